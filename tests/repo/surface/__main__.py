"""`python -m tests.repo.surface [--write] [--at COMMIT [--diff]]`: the surface of this checkout or of a commit.

`--at COMMIT --diff` prints what this checkout lacks of that commit's, and what it has besides.
"""

import argparse
import difflib
import subprocess
import sys
from pathlib import Path

from tests.repo.checkout import checkout

KEPT = Path(__file__).with_name("surface.txt")
_DUMP = Path(__file__).with_name("dump.py")


def surface(commit: str | None = None) -> str:
    """One line for each name, sorted; of this checkout for None."""
    with checkout(commit) as root:
        done = subprocess.run(
            [sys.executable, str(_DUMP)], cwd=root, capture_output=True, text=True, timeout=240, check=False
        )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.repo.surface", description=__doc__)
    parser.add_argument("--at", metavar="COMMIT", help="of this commit")
    parser.add_argument(
        "--diff", action="store_true", help="only lines that this checkout lacks (-) or has besides (+)"
    )
    parser.add_argument("--write", action="store_true", help="keep it in surface.txt")
    options = parser.parse_args()
    found = surface(options.at)
    if options.write:
        KEPT.write_text(found, encoding="utf-8")
    elif options.diff:
        differences = difflib.ndiff(found.splitlines(), surface().splitlines())
        print("\n".join(line for line in differences if line[0] in "+-"))
    else:
        sys.stdout.write(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
