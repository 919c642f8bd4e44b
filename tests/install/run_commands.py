"""Runs commands of `quire` in the interpreter that runs this file, which needs nothing but an installed Quire.

Reads a JSON list of argument lists from standard input, writes a JSON list of {"status", "out", "err"}.
"""

import contextlib
import io
import json
import sys
import traceback
from typing import Any


def run(arguments: list[str]) -> dict[str, Any]:
    """One command as `quire` runs it; an exception that it lets through is its status 1 with a traceback."""
    from quire.cli import main

    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
            status = 1
    return {"status": status, "out": out.getvalue(), "err": err.getvalue()}


if __name__ == "__main__":
    json.dump([run(arguments) for arguments in json.load(sys.stdin)], sys.stdout)
