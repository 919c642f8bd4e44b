"""`python -m tests.golden DIR... [--emit OUT] [--no-fast-path]`: scenario files against the core that serves.

One line per failure (file, step, field, expected, got) and per kind of skip; last line `N passed, M failed, K skipped`; exit
status 1 if any failed or a folder has no scenario files. `--emit OUT` writes for each scenario a file of the same name (below
its folder's name where names clash), `{"name": ..., "trace": [...]}`; for the allocator files the trace is our answers, and
`ops` the operations with our answers in them.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.golden import family_chitu, family_v0, family_v1
from tests.golden.compare import first_difference
from tests.golden.emit import emit_paths
from tests.golden.family_allocators import CachedAllocRun, EvictorRun, TableRun
from tests.golden.forms import ScenarioError, refused
from tests.golden.scenario import Scenario, find, read

Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """How its scenarios are run. `reason_to_skip`: what one needs that is not built; `recorded`: what the reference did."""

    run: Callable[..., Records]
    reason_to_skip: Callable[[Scenario], str | None] = lambda scenario: None
    recorded: Callable[[Scenario], Records | None] = lambda scenario: scenario.trace
    emitted: Callable[[Scenario, Records], dict[str, Any]] = lambda scenario, trace: {
        "name": scenario.name,
        "trace": trace,
    }


_FAMILIES = {
    "v0": Family(family_v0.run),
    "v0bm1": Family(family_v0.run),
    "v1": Family(family_v1.run),
    "chitu": Family(family_chitu.run),
    "evictor": Family(EvictorRun.run, recorded=EvictorRun.recorded, emitted=EvictorRun.emitted),
    "table": Family(TableRun.run, recorded=TableRun.recorded, emitted=TableRun.emitted),
    "cached_alloc": Family(CachedAllocRun.run, recorded=CachedAllocRun.recorded, emitted=CachedAllocRun.emitted),
}


def reason_to_skip(scenario: Scenario) -> str | None:
    """Why a scenario is not run; ScenarioError for an unknown family."""
    if any(tag.startswith("quirk_") for tag in scenario.tags) or "_unsorted_" in scenario.path.name:
        return "shows a quirk of the reference"
    if scenario.family not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise refused("file.family", f"unknown family {scenario.family!r}; there are: {known}", scenario.family)
    return _FAMILIES[scenario.family].reason_to_skip(scenario)


def examine(path: Path, emit: Path | None, *, fast_path: bool = True) -> tuple[str, str]:
    """("passed" | "failed" | "skipped", line or reason); `emit`: where the core's trace is to be written."""
    try:
        scenario = read(path)
        if reason := reason_to_skip(scenario):
            return "skipped", reason
        family = _FAMILIES[scenario.family]
        trace = family.run(scenario, fast_path=fast_path)
        recorded = family.recorded(scenario)
        if emit is not None:
            emit.parent.mkdir(parents=True, exist_ok=True)
            emit.write_text(json.dumps(family.emitted(scenario, trace)), encoding="utf-8")
    except ScenarioError as error:
        return "failed", f"{path}: {error}"
    except Exception as error:
        return "failed", f"{path}: {type(error).__name__}: {' '.join(str(error).split())}"
    if recorded is None:
        return "skipped", "has no trace to compare with"
    found = first_difference(recorded, trace)
    if found is None:
        return "passed", ""
    return "failed", f"{path}: step {found.step}, {found.field}: expected {found.expected}, got {found.got}"


def main(argv: list[str]) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__.splitlines()[0])
    parser.add_argument("places", nargs="+", metavar="DIR", help="folders (searched recursively) or single files")
    parser.add_argument("--emit", type=Path, metavar="OUT", help="write the core's own traces into this folder")
    parser.add_argument(
        "--no-fast-path", action="store_true", help="plan each row of fast decode by itself; traces must be the same"
    )
    args = parser.parse_args(argv)
    try:
        paths = find(args.places)
        targets = emit_paths(paths, args.emit) if args.emit is not None else {}
    except ScenarioError as error:
        parser.error(str(error))
    empty = [place for place in args.places if not find([place])]
    verdicts: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for path in paths:
        verdict, line = examine(path, targets.get(path), fast_path=not args.no_fast_path)
        verdicts[verdict] += 1
        if verdict == "failed":
            print(line)
        elif verdict == "skipped":
            skipped[line] += 1
    for reason, count in sorted(skipped.items()):
        print(f"skipped {count}: {reason}")
    for place in empty:
        print(f"no scenario files in {place}")
    print(f"{verdicts['passed']} passed, {verdicts['failed']} failed, {verdicts['skipped']} skipped")
    return 1 if verdicts["failed"] or empty else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
