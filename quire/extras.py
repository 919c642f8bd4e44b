"""Extras of this distribution: their missing packages, and the command that installs them.

Not here: whether installed versions are in range (quire_tools.doctor.installation).
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
    """Requirements added by `extra`, or those always installed; empty if quire runs from a folder without being installed."""
    try:
        found = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        return []
    base = [requirement for requirement in found if _applies(requirement, "")]
    return [r for r in found if r not in base and _applies(r, extra)] if extra else base


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def version(name: str) -> str | None:
    """Version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def services(*, simulated: bool = False) -> tuple[str, ...]:
    """Extras needed by gateway, scheduler and worker; a simulated worker has no model."""
    return ("gateway", "scheduler") if simulated else ("gateway", "scheduler", _WORKER)


def require(what: str, *extras: str) -> None:
    """Raise ConfigError if packages of `extras` are missing.

    Its one line names what needs them, the packages, and how to install them.
    """
    wanted = dict.fromkeys(requirement.name for extra in extras for requirement in requirements(extra))
    missing = [name for name in wanted if version(name) is None]
    if missing:
        raise not_installed(what, missing, *extras)


def not_installed(what: str, missing: Sequence[str], *extras: str) -> ConfigError:
    """The error of `require` for packages that are known to be missing."""
    verb = "are" if len(missing) > 1 else "is"
    return ConfigError(
        f"{what} needs {', '.join(missing)}, which {verb} not installed: {install_command(*extras)}",
        reason="NOT_INSTALLED",
        metadata={"missing": ",".join(missing)},
    )


def install_command(*extras: str) -> str:
    """Command that installs these extras from this installation's source; PyTorch without CUDA if there is no GPU."""
    pip, names = _pip(), f"[{','.join(extras)}]" if extras else ""
    source = _source()
    if source is None:
        command = f"{pip} install '.{names}' in a checkout, or {pip} install 'FILE.whl{names}' with its wheel file"
    else:
        command = f"{pip} install {source.replace('*', names)}"
    if _WORKER in extras and importlib.util.find_spec("torch") is None and _has_no_gpu():
        torch = files("quire") / "torch-cpu.txt"
        return f"{pip} install --no-deps -r '{torch}' && {command}"  # torch's dependencies come with the second command
    return command


def _pip() -> str:
    """`pip` if it is this interpreter's, else `PYTHON -m pip`."""
    own = Path(sys.executable).with_name("pip")
    return "pip" if shutil.which("pip") == str(own) else f"{sys.executable} -m pip"


def _source() -> str | None:
    """Source to give pip, with * in place of extras: the folder or wheel recorded by pip, or the checkout of this file.

    None if neither exists any more. The package index has no project of this name to fall back on.
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
    """True if PyTorch's default build would install gigabytes of CUDA in vain."""
    return sys.platform == "linux" and shutil.which("nvidia-smi") is None
