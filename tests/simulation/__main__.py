"""`python -m tests.simulation`: scenarios by number, judged from outside; the same number replays the same run.

    python -m tests.simulation --scenarios 1000  # 0 to 999
    python -m tests.simulation --seed 198 --verbose  # one of them, with all that happened
    python -m tests.simulation --wire --scenarios 100  # through real messages, rows and leases, as the service sends them
    python -m tests.simulation --wire --depth 2  # the same with two plans in flight

A scenario's contents are drawn in `scenarios`, `checker` judges, `runs` and `wire_runs` join them.
"""

import sys
import time
from collections import Counter
from hashlib import sha256
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from tests.simulation.runs import Verdict, run
from tests.simulation.scenarios import scenario
from tests.simulation.wire_runs import SERVED_DEPTH, run_wire

Seed = Annotated[int, typer.Option(help="number of the first scenario")]
Count = Annotated[int, typer.Option(min=1, help="how many, one after the other")]
Policy = Annotated[str | None, typer.Option(help="a preset instead of the scenario's own choice")]
Wire = Annotated[bool, typer.Option("--wire", help="with the real messages, rows and leases")]
Depth = Annotated[int, typer.Option(min=1, help="with --wire: plans in flight at once")]
Verbose = Annotated[bool, typer.Option("--verbose", help="print what it is made of and all that happened")]


def main(
    seed: Seed = 0,
    scenarios: Count = 1,
    policy: Policy = None,
    wire: Wire = False,
    depth: Depth = SERVED_DEPTH,
    verbose: Verbose = False,
) -> None:
    """Runs scenarios SEED to SEED + SCENARIOS - 1; status 1 where a promise was broken."""
    console = Console(stderr=True)
    counts, digest, start, num_bad = Counter[str](), sha256(), time.process_time(), 0
    for number in track(range(seed, seed + scenarios), "scenarios", console=console, disable=not console.is_terminal):
        verdict = one(number, policy, depth if wire else None)
        counts.update(verdict.counts)
        digest.update(verdict.digest.encode())
        num_bad += bool(verdict.violations)
        if verbose:
            show(verdict)
        for violation in verdict.violations:
            print(f"scenario {number}, {verdict.scenario.policy}: {violation}")
    spent_s = time.process_time() - start
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    print(f"digest {digest.hexdigest()[:16]}")
    console.print(f"{spent_s:.1f} s of CPU time, {scenarios / spent_s:.0f} scenarios a second")
    if num_bad:
        raise typer.Exit(1)


def one(number: int, policy: str | None, depth: int | None) -> Verdict:
    """One scenario, through the wire where `depth` says how many plans may be in flight there."""
    try:
        return run(scenario(number, policy)) if depth is None else run_wire(number, policy, depth=depth)
    except Exception as error:
        error.add_note(f"scenario {number}" + (f" under policy {policy}" if policy else ""))
        raise


def show(verdict: Verdict) -> None:
    """What a scenario is made of, and its facts in order."""
    given = verdict.scenario
    print(given.setting.spec, given.setting.limits, given.cost, given.faults, sep="\n")
    for fact in verdict.facts:
        print(fact)


if __name__ == "__main__":
    sys.exit(typer.run(main))
