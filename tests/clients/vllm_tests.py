"""`python -m tests.clients.vllm_tests PATH [pytest options]`: vLLM's own HTTP tests, unchanged, against Quire's built-in model.

PATH: the folder `tests` of vLLM's source (the sdist of release 0.33.0). Files are copied beside stand-ins for what they import of
vLLM (`vllm_stand_in`) into a temporary folder; nothing of them is in this repository.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from quire.built_in_model import default_model
from svc_common.version import VERSION
from tests.support.client_tools import tool_environment
from tests.support.worker.adapter_folders import make_adapter

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = Path(__file__).parent / "vllm_stand_in"
CONTEXT = 16_384
FILES = (
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/completion/test_token_in_token_out.py",
    "openai/models/test_models.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "pooling/embed/test_online.py",
    "serve/instrumentator/test_basic.py",
    "serve/lora/test_lora_adapters.py",
    "serve/middleware/test_optional_middleware.py",
    "serve/tokenize/test_tokenization.py",
)


def lay_out(vllm_tests: Path, folder: Path) -> None:
    """Copies the files with the packages that they are in, and the stand-in for `tests.utils`."""
    for name in FILES:
        target = folder / "tests" / "entrypoints" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(vllm_tests / "entrypoints" / name, target)
    shutil.copyfile(vllm_tests / "entrypoints" / "conftest.py", folder / "tests" / "entrypoints" / "conftest.py")
    for package in [folder / "tests", *(path for path in (folder / "tests").rglob("*") if path.is_dir())]:
        (package / "__init__.py").touch()
    shutil.copyfile(STAND_IN / "remote_server.py", folder / "tests" / "utils.py")
    for name in ("stand_in.py", "skipped.py"):
        shutil.copyfile(STAND_IN / name, folder / name)


def long_model(folder: Path) -> Path:
    """The built-in model with a context as long as vLLM's tests ask for."""
    shutil.copytree(default_model(), folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def main() -> int:
    """The command; its status is pytest's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="vLLM's folder tests")
    parser.add_argument(
        "--python", help="an interpreter with requirements-vllm-tests.txt, instead of one in .venv/tools"
    )
    known, options = parser.parse_known_args()
    python = known.python or str(tool_environment("vllm-tests") / "python")
    with tempfile.TemporaryDirectory() as folder:
        lay_out(known.path, Path(folder))
        environment = {
            **os.environ,
            "PYTHONPATH": folder,
            "QUIRE_PYTHON": sys.executable,
            "QUIRE_ROOT": str(ROOT),
            "QUIRE_MODEL": str(long_model(Path(folder) / "model")),
            "QUIRE_ADAPTER": str(make_adapter(default_model(), Path(folder) / "adapter", 0, r=4)),
            "QUIRE_VERSION": VERSION,
            "HF_HUB_OFFLINE": "1",
        }
        command = [
            python,
            "-m",
            "pytest",
            "-p",
            "stand_in",
            "--rootdir",
            folder,
            "--import-mode=prepend",
            "-rs",
            "tests",
        ]
        return subprocess.run([*command, *options], cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
