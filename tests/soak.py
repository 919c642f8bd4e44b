"""`python -m tests.soak`: random lives of the core for as long as you like; each run goes on with the next seeds.

    python -m tests.soak                 # 200 more lives under each preset, and as many with the fast path off and on
    python -m tests.soak --lives 5000    # an hour or so; Ctrl-C keeps what was done

Sums over all runs stand in `benchmarks/results/soak.json`; the first life that fails ends the run with its seed and status 1.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from benchmarks import report
from tests.core.test_fast_path import check as check_fast_path
from tests.core.test_properties import POLICIES, live

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "soak.json"
FIRST_SEED = 1_000_000
TWINS = ("vllm-v1", "vllm-v1-async", "static")


@dataclass
class Sums:
    """What all runs did under one preset. `steps`: of twins the shares that were steady. `next_seed`: where the next run begins."""

    next_seed: int = FIRST_SEED
    lives: int = 0
    steps: int = 0
    cpu_s: float = 0.0

    def add(self, num_steps: int, cpu_s: float) -> None:
        """One more life."""
        self.next_seed += 1
        self.lives += 1
        self.steps += num_steps
        self.cpu_s = round(self.cpu_s + cpu_s, 3)


def read() -> dict[str, Sums]:
    """The sums so far, by preset; twins of the fast path apart."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))["sums"] if RESULTS.exists() else {}
    names = [*POLICIES, *(f"{policy}, fast path off and on" for policy in TWINS)]
    return {name: Sums(**found.get(name, {})) for name in names}


def write(sums: dict[str, Sums]) -> None:
    """Keeps them, with machine and commit of the last run."""
    content = {"benchmark": "tests.soak", "sums": {name: asdict(s) for name, s in sums.items()}}
    report.save("soak", content, RESULTS)


def one_life(name: str, seed: int) -> int:
    """The life of that seed; how many steps it had. AssertionError where a promise was broken."""
    policy, _, twins = name.partition(",")
    return check_fast_path(policy, range(seed, seed + 1), 200) if twins else live(policy, seed).num_steps


def main(lives: Annotated[int, typer.Option(min=1, help="lives under each preset in this run")] = 200) -> None:
    """Random lives of the scheduler core under every preset, going on where the last run ended."""
    console, sums = Console(stderr=True), read()
    try:
        for _ in track(range(lives), "lives under each preset", console=console):
            for name, so_far in sums.items():
                start = time.process_time()
                try:
                    num_steps = one_life(name, so_far.next_seed)
                except Exception as error:
                    console.print(f"[red]{name}, seed {so_far.next_seed}: {type(error).__name__}: {error}")
                    raise typer.Exit(1) from error
                so_far.add(num_steps, time.process_time() - start)
    except KeyboardInterrupt:
        console.print("stopped; what was done is kept")
    finally:
        write(sums)
    for name, so_far in sums.items():
        print(f"{name}: {so_far.lives} lives, {so_far.steps} steps, {so_far.cpu_s:.0f} s")


if __name__ == "__main__":
    sys.exit(typer.run(main))
