"""An installation without extras: every `--help` works, and each command that needs more says what, in one line."""

import os
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from quire import extras
from svc_common.errors import ConfigError
from tests.install import bare
from tests.install.test_dependencies import PROJECT
from tests.support.tree import ROOT


def base_distributions() -> set[str]:
    """What is always installed, with all that it needs in turn."""
    found: set[str] = set()
    wanted = list(PROJECT["dependencies"])
    while wanted:
        requirement = Requirement(wanted.pop())
        name = canonicalize_name(requirement.name)
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(name)
            wanted += metadata.requires(name) or ()
    return found


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that sees those packages of this environment, this checkout, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    [site] = folder.glob("lib/python*/site-packages")
    for name in base_distributions():
        files = metadata.files(name) or ()
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            _link(Path(str(files[0].locate())).parents[len(files[0].parts) - 1] / top, site / top)
    (site / "quire.pth").write_text(f"{ROOT}\n{ROOT / 'kernels'}\n")
    info = site / f"quire-{PROJECT['version']}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.4", "Name: quire", f"Version: {PROJECT['version']}"]
    lines += [f"Requires-Dist: {text}" for text in PROJECT["dependencies"]]
    for extra, texts in PROJECT["optional-dependencies"].items():
        lines += [f"Requires-Dist: {_with_extra(text, extra)}" for text in texts]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    return folder / "bin" / "python"


def _link(source: Path, target: Path) -> None:
    """Several distributions share a namespace package: its parts are linked one by one."""
    if source.is_dir() and not (source / "__init__.py").exists() and not source.name.endswith(("-info", ".libs")):
        target.mkdir(exist_ok=True)
        for part in source.iterdir():
            if not (target / part.name).exists():
                _link(part, target / part.name)
    elif not target.exists() and source.exists():
        target.symlink_to(source)


def _with_extra(text: str, extra: str) -> str:
    before, _, marker = text.partition(";")
    return f'{before}; extra == "{extra}"' + (f" and ({marker.strip()})" if marker else "")


def test_every_command_helps_or_says_what_is_missing(bare_python: Path, tmp_path: Path) -> None:
    """No traceback anywhere; `quire doctor` ends with 1."""
    environ = {name: "" for name in ("PYTHONPATH", "QUIRE_TARGET")}
    assert bare.faults(bare_python, tmp_path, environ=environ) == []


def test_the_bare_environment_is_bare(bare_python: Path) -> None:
    """The test above could fail: none of the extras can be imported there."""
    code = (
        "import importlib.util as u; print([n for n in ('torch','starlette','httpx','cryptography') if u.find_spec(n)])"
    )
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [bare_python, "-c", code], capture_output=True, text=True, check=True, env=environ, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_nothing_is_missing_here() -> None:
    """The development environment has every extra."""
    extras.require("this", "gateway", "scheduler", "worker", "bench", "tls")
    with pytest.raises(ConfigError, match=r"^this needs no-such-package, which is not installed: .*pip install"):
        raise extras.not_installed("this", ["no-such-package"], "bench")


def test_the_command_is_that_of_this_installation() -> None:
    """A checkout: its folder, which exists, with the extras."""
    command = extras.install_command("gateway", "worker")
    folder = Path(command.rpartition("'")[0].rpartition("'")[2].removesuffix("[gateway,worker]"))
    assert (folder / "pyproject.toml").is_file()
    assert command.startswith(("pip ", f"{sys.executable} -m pip "))
