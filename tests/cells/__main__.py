"""`python -m tests.cells [smg] [envoy] [upgrade] [restarts]`: routers in front of two cells; status 0 when all checks passed."""

import argparse
import platform
import tempfile
from pathlib import Path

from tests.cells import envoy_rig, restarts_rig, smg_rig, upgrade_rig
from tests.support.commands import ROOT, Failure, Progress

ROUTERS = ("smg", "envoy", "upgrade", "restarts")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.cells", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="in all, over the router's ways and policies")
    parser.add_argument("--old", type=Path, help="upgrade: wheel of the old release; default: built from --from")
    parser.add_argument(
        "--from", dest="revision", help="upgrade: default: the latest tag before this commit, else its parent"
    )
    parser.add_argument(
        "routers",
        nargs="*",
        default=ROUTERS,
        help="smg, envoy, upgrade (Envoy, and what `make wheel` built), restarts (Envoy; 10 of each service)",
    )
    given = parser.parse_args()
    progress = Progress()
    with tempfile.TemporaryDirectory() as folder:
        try:
            if "smg" in given.routers:
                smg_rig.check(given.requests, Path(folder), progress)
            if "envoy" in given.routers:
                envoy_rig.check(given.requests // 10, Path(folder), progress)
            if "upgrade" in given.routers:
                [wheel] = (ROOT / "dist").glob(f"quire-*_{platform.machine()}.whl")
                upgrade_rig.check(wheel, given.old, given.revision, Path(folder), progress)
            if "restarts" in given.routers:
                restarts_rig.check(restarts_rig.TIMES, Path(folder), progress)
        except Failure as failure:
            progress.say(f"FAILED: {failure}")
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
