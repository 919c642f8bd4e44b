"""What vLLM's tests know as RemoteOpenAIServer: here `quire up` with the built-in model under the name that the test uses.

Runs in the environment of vLLM's tests, without Quire: `QUIRE_PYTHON` is the interpreter that has it, `QUIRE_MODEL` the model.
"""

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import openai
import pytest

API_KEY = "token-abc123"
ROCM_EXTRA_ARGS: list[str] = []
ROCM_ENV_OVERRIDES: dict[str, str] = {}

# Options of `vllm serve` about how it runs, or that say what Quire always does; with how many values.
_IGNORED = {
    "--dtype": 1,
    "--enable-auto-tool-choice": 0,
    "--enable-chunked-prefill": 0,
    "--enable-lora": 0,
    "--enable-per-request-metrics": 0,
    "--enable-prompt-tokens-details": 0,
    "--enable-request-id-headers": 0,
    "--enable-server-load-tracking": 0,
    "--enable-tokenizer-info-endpoint": 0,
    "--enforce-eager": 0,
    "--gpu-memory-utilization": 1,
    "--max-cpu-loras": 1,
    "--max-logprobs": 1,
    "--max-lora-rank": 1,
    "--reasoning-parser": 1,
    "--runner": 1,
    "--seed": 1,
    "--structured-outputs-config.backend": 1,
    "--tool-call-parser": 1,
}
_OURS = {
    "--enable-prefix-caching": 0,
    "--max-model-len": 1,
    "--max-num-batched-tokens": 1,
    "--max-num-seqs": 1,
    "--no-enable-prefix-caching": 0,
}


class RemoteOpenAIServer:
    """A context: running from its beginning to its end."""

    DUMMY_API_KEY = API_KEY

    def __init__(self, model: str, vllm_serve_args: Sequence[str], **_: Any) -> None:
        ports = [part for name in ("grpc", "http", "admin", "admin-http") for part in (f"--{name}-port", "0")]
        command = [os.environ["QUIRE_PYTHON"], "-m", "quire", "up", "--model", os.environ["QUIRE_MODEL"]]
        command += ["--served-model-name", model, *ports, *_translated(list(vllm_serve_args))]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=os.environ["QUIRE_ROOT"])
        self.url_root = self._ready_url()

    def _ready_url(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ready "):
                return next(word.removeprefix("http=") for word in line.split() if word.startswith("http="))
        raise RuntimeError(f"quire up ended with status {self._process.wait()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)

    def url_for(self, *parts: str) -> str:
        """URL of a path."""
        return "/".join([self.url_root, *parts])

    def get_client(self, **changes: Any) -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(**{"base_url": self.url_for("v1"), "api_key": API_KEY, "max_retries": 0, **changes})

    def get_async_client(self, **changes: Any) -> openai.AsyncOpenAI:
        """The same, asynchronous."""
        return openai.AsyncOpenAI(**{"base_url": self.url_for("v1"), "api_key": API_KEY, "max_retries": 0, **changes})


def _tenants_file(api_key: str) -> str:
    """One tenant with one key, in a file that lives as long as the process."""
    digest = hashlib.sha256(api_key.encode()).hexdigest()
    path = Path(tempfile.mkdtemp()) / "tenants.toml"
    path.write_text(f'[[tenants.tester.keys]]\nsha256 = "{digest}"\nadmin = true\n', encoding="utf-8")
    return str(path)


def _translated(arguments: list[str]) -> list[str]:
    """Options of Quire; skips the tests of a server with an option that Quire has not."""
    ours: list[str] = []
    while arguments:
        name, _, value = arguments.pop(0).partition("=")
        number = _IGNORED.get(name, _OURS.get(name, 1))
        values = [value] if value else [arguments.pop(0) for _ in range(min(number, len(arguments)))]
        if name in _OURS:
            ours += [name, *values]
        elif name == "--lora-modules":
            ours += ["--adapter", *values]
        elif name == "--api-key":
            ours += ["--tenants", _tenants_file(*values)]
        elif name not in _IGNORED:
            pytest.skip(f"vllm serve {name}: no such option here", allow_module_level=True)
    return ours
