"""Third-party tools for tests, each in an environment of its own in .venv/tools, made on first use from requirements-NAME.txt.

Nothing of them is installed beside Quire, and they find nothing of Quire: they speak HTTP to it. They are offline once installed.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
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
    return _made(name, _install) / "bin"


def tool_files(name: str) -> Path:
    """The packages of requirements-NAME.txt without what they need, for files that they hold; skips as above."""
    return _made(name, _unpack)


def _made(name: str, make: Callable[[Path, Path], None]) -> Path:
    folder, requirements = Path(sys.prefix) / "tools" / name, _FOLDER / f"requirements-{name}.txt"
    wanted, installed = requirements.read_text(encoding="utf-8"), folder / ".requirements.txt"
    if not (installed.is_file() and installed.read_text(encoding="utf-8") == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        make(folder, requirements)
        installed.write_text(wanted, encoding="utf-8")
    return folder


def _install(folder: Path, requirements: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, capture_output=True, timeout=120)
    _pip(folder / "bin" / "python", requirements)


def _unpack(folder: Path, requirements: Path) -> None:
    _pip(Path(sys.executable), requirements, "--no-deps", "--target", str(folder))


def _pip(python: Path, requirements: Path, *options: str) -> None:
    pip = [python, "-m", "pip", "install", "--quiet", "--retries", "1", *options, "-r", requirements]
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
