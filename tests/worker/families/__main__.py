"""`python -m tests.worker.families [TYPE ...] [--write] [--resume]`: every causal language model class against `generate`.

Prints each outcome as it comes, and counts at the end; fails if a class gives other tokens without an error or
raises an error that is no refusal. Without `--write` it also fails if outcomes are not those of table.json.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import transformers

from tests import models_page
from tests.worker.families.outcomes import FAULTS, PATH, Table, Trial
from tests.worker.families.processes import run
from tests.worker.families.tiny_configs import model_types

_KEPT = Path(tempfile.gettempdir()) / f"quire-families-{transformers.__version__}.json"


def main(argv: list[str]) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.worker.families", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("types", nargs="*", help="model types; all of them by default")
    parser.add_argument("--write", action="store_true", help="write outcomes to table.json, and docs/models.md")
    parser.add_argument("--resume", action="store_true", help="keep the outcomes of a run that was cut off")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1, help="number of processes")
    given = parser.parse_args(argv)
    found = _tried(given.types or model_types(), given.at_once, resume=given.resume)
    if given.write:
        _written(found).write()
        models_page.main(["--write"])
    return _verdict(found, None if given.write else Table.read())


def _tried(types: list[str], at_once: int, *, resume: bool) -> dict[str, Trial]:
    """Outcomes of these types, printed and kept as they come."""
    found = dict(Table.read(_KEPT).trials) if resume and _KEPT.exists() else {}
    found = {name: trial for name, trial in found.items() if name in types}
    left, start = [name for name in types if name not in found], time.monotonic()
    for trial, seconds in run(left, at_once):
        found[trial.model_type] = trial
        Table(transformers.__version__, found).write(_KEPT)
        size = f"{trial.num_tokens} tokens, reach {trial.reach}" if trial.num_tokens else trial.why
        size += "".join(f"; {name}: {what}" for name, what in trial.forms.items())
        print(f"{len(found)}/{len(types)} {trial.model_type}: {trial.outcome} ({seconds:.1f} s) {size}", flush=True)
    print(f"{len(left)} classes in {time.monotonic() - start:.0f} s")
    return found


def _written(found: dict[str, Trial]) -> Table:
    """The committed outcomes with these, of classes that still exist."""
    before = Table.read().trials if PATH.exists() else {}
    kept = {name: trial for name, trial in before.items() if name in model_types()}
    return Table(transformers.__version__, kept | found)


def _verdict(found: dict[str, Trial], table: Table | None) -> int:
    """Print counts and what is wrong; 1 if anything is."""
    print(", ".join(f"{count} {outcome}" for outcome, count in Counter(t.outcome for t in found.values()).items()))
    faults = [trial for trial in found.values() if trial.outcome in FAULTS]
    for trial in faults:
        print(f"FAULT: {trial.model_type} ({trial.model_class}) {trial.outcome}: {trial.why}")
    changed = [] if table is None else [t for t in found.values() if _differs(t, table.trials.get(t.model_type))]
    for trial in changed:
        print(
            f"CHANGED: {trial.model_type} is {trial.outcome}, not as in table.json; `make test-families ARGS=--write`"
        )
    return int(bool(faults or changed))


def _differs(now: Trial, before: Trial | None) -> bool:
    return before is None or (now.outcome, now.why, now.forms) != (before.outcome, before.why, before.forms)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
