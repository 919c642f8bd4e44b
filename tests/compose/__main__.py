"""`python -m tests.compose [--cache FOLDER] [--release] [PYTEST ARGUMENTS]`: the whole of it; exit status 0 when all checks passed.

Needs Linux, root, apt and about 5 GB of disk. Nothing is left behind but the cache (default .venv/compose, or QUIRE_COMPOSE_CACHE)
and the packages that were missing.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from tests.compose import engine, images, release, report, wheels
from tests.compose.checks.conftest import FIGURES_VARIABLE
from tests.compose.engine import Engine
from tests.support import debian
from tests.support.commands import ROOT, Failure, Progress

_CHECKS = "tests/compose/checks"
_CHECKS_S = 1200


def main() -> int:
    """The command."""
    given, pytest_arguments = _parser().parse_known_args()
    for sign in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, _stopped)
    progress = Progress()
    try:
        return (_release if given.release else _run)(given.cache, pytest_arguments, progress)
    except Failure as failure:
        progress.say(f"FAILED: {failure}")
        return 1
    except KeyboardInterrupt:
        progress.say("stopped; nothing is left running")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.compose", description=__doc__)
    cache = os.environ.get("QUIRE_COMPOSE_CACHE") or ROOT / ".venv" / "compose"
    parser.add_argument("--cache", type=Path, default=Path(cache), help="folder for what is fetched")
    parser.add_argument("--release", action="store_true", help="instead: make a release with images, twice")
    return parser


def _stopped(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run(cache: Path, pytest_arguments: list[str], progress: Progress) -> int:
    with _engine(cache, progress) as (docker, mirror):
        compose = images.ComposeFile.read(docker)
        images.build_ours(docker, mirror, progress)
        images.build_stand_ins(docker, mirror, compose, progress)
        sizes = images.sizes(docker, compose)
        with progress.step("checks"):
            status, figures, counts = _check(docker, pytest_arguments)
        versions = _versions(docker)
    report.show(progress.seconds, sizes, figures)
    if status == 0 and not pytest_arguments:
        progress.say(f"written: {report.save(progress.seconds, sizes, figures, versions, counts).relative_to(ROOT)}")
    return status


def _release(cache: Path, pytest_arguments: list[str], progress: Progress) -> int:
    if pytest_arguments:
        raise Failure(f"--release takes no more arguments: {' '.join(pytest_arguments)}")
    with _engine(cache, progress) as (docker, mirror):
        release.check(docker, mirror, progress)
    return 0


@contextmanager
def _engine(cache: Path, progress: Progress) -> Iterator[tuple[Engine, Path]]:
    """An engine with the base images, and the folder that builds take packages and wheels from; nothing is left of it."""
    if os.geteuid() != 0:
        raise Failure("root is needed: a Docker engine is started, in a network namespace of its own")
    cache = cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    fetched, tar, mirror = _fetch(cache, progress)
    with Engine(fetched) as docker:
        images.check_no_images(docker)
        with progress.step("base images"):
            images.import_bases(docker, tar)
        yield docker, mirror
    if left := engine.leftovers():
        raise Failure(f"left behind: {', '.join(left)}")
    progress.say("nothing is left: no process, no mount, no control group, no namespace, no folder")


def _fetch(cache: Path, progress: Progress) -> tuple[debian.Docker, Path, Path]:
    """Docker, the base's tar file, the folder that builds take packages and wheels from."""
    debian.install_programs(progress)
    with progress.step("fetching Docker"):
        docker = debian.fetch_docker(cache)
    with progress.step("fetching the base system"):
        tar = debian.make_base(cache)
    with progress.step("fetching Debian packages"):
        debs = debian.fetch_for_builds(cache)
    with progress.step("fetching wheels"):
        found = wheels.fetch_wheels(cache)
    return docker, tar, images.make_mirror(cache, debs, found)


def _check(docker: Engine, pytest_arguments: list[str]) -> tuple[int, dict[str, Any], str]:
    """pytest in the engine's network: its exit status, what the checks measured, its last line."""
    path = engine.FOLDER / "figures.json"
    path.write_text("{}", encoding="utf-8")
    options = ["-o", "python_files=check_*.py", "--timeout=300", "-v", "-p", "no:cacheprovider"]
    words = [*engine.inside(), sys.executable, "-m", "pytest", *options, _CHECKS, *pytest_arguments]
    environ = {**os.environ, **docker.environ, FIGURES_VARIABLE: str(path)}
    process = subprocess.Popen(words, env=environ, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        last = _echoed(process)
        status = process.wait(timeout=_CHECKS_S)
    finally:
        process.terminate()
        process.wait()
    return status, json.loads(path.read_text(encoding="utf-8")), last


def _echoed(process: subprocess.Popen[str]) -> str:
    last = ""
    for line in process.stdout or ():
        sys.stdout.write(line)
        sys.stdout.flush()
        last = line.strip("= \n") or last
    return last


def _versions(docker: Engine) -> dict[str, str]:
    return {
        "server": docker.docker("version", "--format", "{{.Server.Version}}").strip(),
        "compose": docker.docker("compose", "version", "--short").strip(),
        "storage_driver": docker.docker("info", "--format", "{{.Driver}}").strip(),
    }


if __name__ == "__main__":
    sys.exit(main())
