"""The wheels that the three Dockerfiles install, fetched once by this machine's pip and kept until they ask for others.

They are for the Python of the base image (3.11) on this machine's processor, whatever Python runs this.
"""

import hashlib
import platform
import re
import shutil
import sys
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

from tests.support.commands import ROOT, Failure, run

EXTRAS = ("gateway", "scheduler", "worker")
_PYTHON = "3.11"
_CONSTRAINTS = ROOT / "constraints.txt"


def fetch_wheels(folder: Path) -> Path:
    """A folder for `pip install --no-index --find-links`."""
    wanted = _wanted()
    target = folder / "wheels"
    key = hashlib.sha256("\n".join([*wanted, _CONSTRAINTS.read_text(encoding="utf-8")]).encode()).hexdigest()
    stamp = target / ".complete"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != key:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        run(sys.executable, "-m", "pip", "download", "--quiet", *_options(target), *wanted)
        _refuse_cuda(target)
        stamp.write_text(key, encoding="utf-8")
    return target


def _wanted() -> list[str]:
    """Requirements of the images, and of building our own wheel with the CPU kernels in them."""
    words = (sys.executable, ROOT / "deploy" / "requirements.py", *EXTRAS)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packing = {*project["build-system"]["requires"], *project["project"]["optional-dependencies"]["release"]}
    return sorted({*run(*words).splitlines(), *packing})


def _options(target: Path) -> list[str]:
    machine = platform.machine()
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(36, 4, -1)]
    platforms += [f"manylinux2014_{machine}", f"linux_{machine}", "any"]
    return [
        *("--dest", str(target)),
        *("--constraint", str(_CONSTRAINTS)),
        "--only-binary=:all:",
        *("--implementation", "cp"),
        *("--python-version", _PYTHON),
        *(word for name in platforms for word in ("--platform", name)),
        *_index_of_torch(),
    ]


def _index_of_torch() -> list[str]:
    """The index that deploy/worker.Dockerfile takes torch from, where it can be reached; else pip's own settings must know one."""
    text = (ROOT / "quire" / "torch-cpu.txt").read_text(encoding="utf-8")
    (url,) = re.findall(r"^--index-url (\S+)", text, re.M)
    try:
        with urllib.request.urlopen(url, timeout=5):
            return ["--extra-index-url", url]
    except (urllib.error.URLError, TimeoutError):
        return []


def _refuse_cuda(target: Path) -> None:
    if found := [wheel.name for wheel in target.glob("nvidia*.whl")]:
        shutil.rmtree(target)
        raise Failure(f"pip finds no torch for CPU here, only one with CUDA ({found[0]}, ...)")
