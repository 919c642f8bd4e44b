"""`python -m tests.install WHEEL`: what `make wheel` built in an empty environment, as `make test-install` and CI run it.

Needs a package index, or pip settings that name one, and about 2 GB of disk for as long as it runs. Exit status 0 when all passed.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.install.checks import CHECKS, Check
from tests.install.environment import Environment
from tests.support.commands import Failure, Progress


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.install", description=__doc__)
    parser.add_argument("wheel", type=Path, help="what `make wheel` built")
    given = parser.parse_args()
    progress = Progress()
    with tempfile.TemporaryDirectory(prefix="quire-install-") as folder:
        try:
            environment = _prepare(given.wheel, Path(folder), progress)
        except Failure as failure:
            progress.say(f"FAIL installing: {failure}")
            return 1
        failed = sum(not _passes(check, environment, progress) for check in CHECKS)
    sys.stdout.write(f"{len(CHECKS) - failed} passed, {failed} failed\n")
    return min(failed, 1)


def _prepare(wheel: Path, folder: Path, progress: Progress) -> Environment:
    progress.say(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    environment = Environment(wheel.resolve(), folder / "environment")
    with progress.step("installation without extras"):
        environment.make()
    return environment


def _passes(check: Check, environment: Environment, progress: Progress) -> bool:
    began_s = time.monotonic()
    try:
        said = check(environment)
    except Exception as error:  # whatever it is, the next check is run
        progress.say(f"FAIL {check.__name__}: {error if isinstance(error, Failure) else repr(error)}")
        return False
    progress.say(f"PASS {check.__name__} ({time.monotonic() - began_s:.0f} s): {said}")
    return True


if __name__ == "__main__":
    sys.exit(main())
