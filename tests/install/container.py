"""`python -m tests.install.container WHEEL`: the wheel in a bare container, as `make test-container` runs it.

The container is Debian with its own Python and nothing else, in namespaces of its own for mounts, processes and network; no engine
is needed. The wheel is installed with the extras that README.md names, from wheels fetched before, and `quire run` answers with the
built-in model: once in a home where nothing ran, and again. Needs Linux, root, Debian's apt and a package index. Exit status 0
when it answered twice alike; seconds are printed and not judged.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.compose.wheels import EXTRAS, fetch_wheels
from tests.install.checks import RUN, first_output
from tests.support import debian
from tests.support.commands import ROOT, Failure, Progress, run

_USER = "10001:10001"
_HOME = "home/quire"
_WHEELS = "wheels"
_VARIABLES = (f"HOME=/{_HOME}", f"PATH=/{_HOME}/venv/bin:/usr/bin:/bin", "LANG=C.UTF-8", "PIP_NO_INDEX=1")
_ENTER = """
ip link set lo up || exit 125
mount --bind /dev "$ROOT/dev" && mount --bind "$WHEELS" "$ROOT/wheels" && mount -t proc proc "$ROOT/proc" || exit 125
exec "$@"
"""
"""Run in the new namespaces: what is mounted ends with them, and the only network is their loopback."""


class Container:
    """A root file system in `folder`, unpacked from `base`; `wheels` are seen at /wheels."""

    def __init__(self, base: Path, wheels: Path, folder: Path) -> None:
        self.root, self._wheels = folder / "root", wheels
        (self.root / _HOME).mkdir(parents=True)
        run("tar", "-C", self.root, "--numeric-owner", "-xf", base)
        (self.root / _WHEELS).mkdir()
        shutil.chown(self.root / _HOME, *map(int, _USER.split(":")))

    def command(self, *words: str) -> list[str]:
        """What runs `words` inside, as a user without rights, with an empty environment. Its processes end with the first one."""
        spaces = ("--mount", "--pid", "--ipc", "--uts", "--net", "--fork", "--kill-child")
        unshare = ("unshare", *spaces, "/bin/sh", "-c", _ENTER, "sh")
        inside = (
            "chroot",
            f"--userspec={_USER}",
            str(self.root),
            "/usr/bin/env",
            "-i",
            f"--chdir=/{_HOME}",
            *_VARIABLES,
        )
        return [*unshare, *inside, *words]

    @property
    def environ(self) -> dict[str, str]:
        """Of the commands' outer half."""
        return {**os.environ, "ROOT": str(self.root), "WHEELS": str(self._wheels)}

    def run(self, *words: str) -> str:
        """Output of a command inside; Failure if it fails."""
        return run(*self.command(*words), environ=self.environ)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.install.container", description=__doc__)
    parser.add_argument("wheel", type=Path, help="what `make wheel` built")
    cache = os.environ.get("QUIRE_COMPOSE_CACHE") or ROOT / ".venv" / "compose"
    parser.add_argument("--cache", type=Path, default=Path(cache), help="folder for what is fetched")
    given = parser.parse_args()
    progress = Progress()
    try:
        with tempfile.TemporaryDirectory(prefix="quire-container-") as folder:
            container = _container(given.cache.resolve(), Path(folder), progress)
            shutil.copy(given.wheel, container.root / "tmp")
            _check(container, given.wheel.name, progress)
    except Failure as failure:
        progress.say(f"FAIL {failure}")
        return 1
    return 0


def _container(cache: Path, folder: Path, progress: Progress) -> Container:
    if os.geteuid() != 0:
        raise Failure("root is needed: a root file system is unpacked and entered")
    cache.mkdir(parents=True, exist_ok=True)
    debian.install_programs(progress, ("debootstrap", "ip"))
    with progress.step("fetching the base system"):
        base = debian.make_base(cache)
    with progress.step("fetching wheels"):
        wheels = fetch_wheels(cache)
    with progress.step("unpacking the base system"):
        return Container(base, wheels, folder)


def _check(container: Container, wheel: str, progress: Progress) -> None:
    began_s = time.monotonic()
    with progress.step(f"installation with {', '.join(EXTRAS)}"):
        container.run("python3", "-m", "venv", f"/{_HOME}/venv")
        pip = ("pip", "install", "--quiet", "--find-links", f"/{_WHEELS}")
        container.run(*pip, f"/tmp/{wheel}[{','.join(EXTRAS)}]")
    install_s = time.monotonic() - began_s
    cold_s, first = _answer(container)
    progress.say(f"from the wheel to the first token: {install_s + cold_s:.1f} s (goal: 60)")
    warm_s, again = _answer(container)
    if first != again or not first.strip():
        raise Failure(f"quire run: {first!r}, then {again!r}")
    progress.say(f"`quire run`: first token after {cold_s:.1f} s, and after {warm_s:.1f} s the second time (goal: 5)")


def _answer(container: Container) -> tuple[float, str]:
    command: Sequence[str] = container.command("quire", *RUN)
    return first_output(command, env=container.environ)


if __name__ == "__main__":
    sys.exit(main())
