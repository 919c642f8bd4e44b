"""Extras of this distribution: which of their packages are missing, and the command that installs them.

Not here: whether what is installed is in range (quire.doctor.installation).
"""

import importlib.util
import json
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from packaging.requirements import Requirement

from svc_common.errors import ConfigError

DISTRIBUTION = "quire"

_WORKER = "worker"
_PACKAGE = Path(__file__).resolve().parent


def requirements(extra: str = "") -> list[Requirement]:
    """What `extra` adds, or what is always installed; empty where quire runs from a folder without being installed."""
    try:
        found = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        return []
    base = [requirement for requirement in found if _applies(requirement, "")]
    return [r for r in found if r not in base and _applies(r, extra)] if extra else base


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def version(name: str) -> str | None:
    """Of an installed distribution; None: it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def services(*, simulated: bool = False) -> tuple[str, ...]:
    """Extras that gateway, scheduler and worker need; a simulated worker has no model."""
    return ("gateway", "scheduler") if simulated else ("gateway", "scheduler", _WORKER)


def require(what: str, *extras: str) -> None:
    """ConfigError in one line, where packages of `extras` are missing: what needs them, which they are, how to install them."""
    wanted = dict.fromkeys(requirement.name for extra in extras for requirement in requirements(extra))
    missing = [name for name in wanted if version(name) is None]
    if missing:
        raise not_installed(what, missing, *extras)


def not_installed(what: str, missing: Sequence[str], *extras: str) -> ConfigError:
    """The error of `require`, for packages that are known to be missing."""
    verb = "are" if len(missing) > 1 else "is"
    return ConfigError(
        f"{what} needs {', '.join(missing)}, which {verb} not installed: {install_command(*extras)}",
        reason="NOT_INSTALLED",
        metadata={"missing": ",".join(missing)},
    )


def install_command(*extras: str) -> str:
    """A command that installs these extras from where this installation came from; PyTorch without CUDA where there is no GPU."""
    pip, names = _pip(), f"[{','.join(extras)}]" if extras else ""
    source = _source()
    if source is None:
        command = f"{pip} install '.{names}' in a checkout, or {pip} install 'FILE.whl{names}' with its wheel file"
    else:
        command = f"{pip} install {source.replace('*', names)}"
    if _WORKER in extras and importlib.util.find_spec("torch") is None and _has_no_gpu():
        torch = files("quire") / "torch-cpu.txt"
        return f"{pip} install --no-deps -r '{torch}' && {command}"  # what torch needs comes with the second
    return command


def _pip() -> str:
    """`pip`, if that is the one of this interpreter."""
    own = Path(sys.executable).with_name("pip")
    return "pip" if shutil.which("pip") == str(own) else f"{sys.executable} -m pip"


def _source() -> str | None:
    """What to give pip, with * where extras go: the folder or wheel that pip wrote down, or the checkout that this file lies in.

    None where neither exists any more. There is no project of this name on the package index to fall back on.
    """
    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    recorded = json.loads(text) if text else {}
    place = Path(url2pathname(urlsplit(recorded.get("url", "")).path))
    if place.is_file() or (place / "pyproject.toml").is_file():
        return f"{'-e ' if recorded.get('dir_info', {}).get('editable') else ''}'{place}*'"
    checkout = _PACKAGE.parent
    return f"'{checkout}*'" if (checkout / "pyproject.toml").is_file() else None


def _has_no_gpu() -> bool:
    """Whether PyTorch's default build would bring gigabytes of CUDA for nothing."""
    return sys.platform == "linux" and shutil.which("nvidia-smi") is None
