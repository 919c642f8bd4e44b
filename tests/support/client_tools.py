"""Third-party tools for tests, each in an environment of its own in .venv/tools, made on first use from requirements-NAME.txt.

Nothing of them is installed beside Quire, and they find nothing of Quire: they speak HTTP to it. They are offline once installed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parents[1] / "clients"
_INSTALL_S = 900
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}
_OURS = {"PYTHONPATH", "VIRTUAL_ENV"}


def tool_environment(name: str) -> Path:
    """The `bin` folder of tool `name`. Skips where it has to be installed and no package index answers."""
    folder = Path(sys.prefix) / "tools" / name
    wanted = (_FOLDER / f"requirements-{name}.txt").read_text(encoding="utf-8")
    installed = folder / ".requirements.txt"
    if not (installed.is_file() and installed.read_text(encoding="utf-8") == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        _install(folder, _FOLDER / f"requirements-{name}.txt")
        installed.write_text(wanted, encoding="utf-8")
    return folder / "bin"


def _install(folder: Path, requirements: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, capture_output=True, timeout=120)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--retries", "1", "-r", requirements]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        pytest.skip(f"{requirements.name} could not be installed: {' '.join(said)[-300:]}")


def run_tool(name: str, program: str, *arguments: str, cwd: Path, timeout_s: float = 200) -> str:
    """Runs `program` of the tool's environment to its successful end; what it printed."""
    command = [tool_environment(name) / program, *arguments]
    env = {key: value for key, value in os.environ.items() if key not in _OURS}
    env |= {**_OFFLINE, "HF_HOME": str(cwd / "hf"), "HOME": str(cwd)}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
