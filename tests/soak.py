"""`python -m tests.soak`: random lives of the core for as long as you like; each run goes on with the next seeds.

    python -m tests.soak                 # 200 more lives under each preset, and as many with the fast path off and on
    python -m tests.soak --lives 5000    # an hour or so; Ctrl-C keeps what was done
    python -m tests.soak --lives 0 --scenarios 20000    # whole simulations only (tests/simulation)
    python -m tests.soak --lives 0 --scenarios 0 --scheduler-kills 50    # a real stack whose scheduler is killed under load
    python -m tests.soak --lives 0 --scenarios 0 --tests 3    # tests that are too long for `make test-long`, in turn

Sums over all runs stand in `benchmarks/results/soak.json`; the first life or scenario that fails ends the run with its seed and
status 1, and is the first of the next run.
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
from tests.simulation.runs import run
from tests.simulation.scenarios import scenario
from tests.soak_kills import KILLS_PER_SEED, KillSums, kill_on
from tests.soak_tests import Passed, collected, longest_ago, test_on
from tests.support.core.preset_lives import POLICIES, live

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "soak.json"
FIRST_SEED = 1_000_000
TWINS = ("vllm-v1", "vllm-v1-async", "static", "quire")


@dataclass
class Sums:
    """What all runs did under one preset. `steps`: of twins, shares in fast decode. `next_seed`: where the next run begins."""

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


@dataclass
class SimulationSums:
    """What all simulated scenarios did. `violations`: of the one that ended the last run, 0 = it came to its end."""

    next_seed: int = FIRST_SEED
    scenarios: int = 0
    requests: int = 0
    steps: int = 0
    workers_lost: int = 0
    violations: int = 0
    cpu_s: float = 0.0

    def add(self, seed: int) -> list[str]:
        """The scenario of that number; what was wrong with it, in which case it does not count."""
        start = time.process_time()
        verdict = run(scenario(seed))
        self.violations = len(verdict.violations)
        if not verdict.violations:
            self.next_seed, self.scenarios = seed + 1, self.scenarios + 1
            for name in ("requests", "steps", "workers_lost"):
                setattr(self, name, getattr(self, name) + verdict.counts[name])
            self.cpu_s = round(self.cpu_s + time.process_time() - start, 3)
        return verdict.violations


def read() -> tuple[dict[str, Sums], SimulationSums, KillSums, Passed]:
    """The sums so far, by preset, twins of the fast path apart; of the simulation; of the scheduler's kills; of long tests."""
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"sums": {}}
    names = [*POLICIES, *(f"{policy}, fast path off and on" for policy in TWINS)]
    sums = {name: Sums(**found["sums"].get(name, {})) for name in names}
    kills = KillSums(**found.get("scheduler_kills", {}))
    return sums, SimulationSums(**found.get("simulation", {})), kills, found.get("tests", {})


def write(sums: dict[str, Sums], simulation: SimulationSums, kills: KillSums, tests: Passed) -> None:
    """Keeps them, with machine and commit of the last run."""
    content = {
        "benchmark": "tests.soak",
        "sums": {name: asdict(s) for name, s in sums.items()},
        "simulation": asdict(simulation),
        "scheduler_kills": asdict(kills),
        "tests": tests,
    }
    report.save("soak", content, RESULTS)


def one_life(name: str, seed: int) -> int:
    """The life of that seed; how many steps it had. AssertionError where a promise was broken."""
    policy, _, twins = name.partition(",")
    return check_fast_path(policy, range(seed, seed + 1), 200) if twins else live(policy, seed).num_steps


def live_on(sums: dict[str, Sums], lives: int, console: Console) -> None:
    """More lives under every preset."""
    for _ in track(range(lives), "lives under each preset", console=console):
        for name, so_far in sums.items():
            start = time.process_time()
            try:
                num_steps = one_life(name, so_far.next_seed)
            except Exception as error:
                console.print(f"[red]{name}, seed {so_far.next_seed}: {type(error).__name__}: {error}")
                raise typer.Exit(1) from error
            so_far.add(num_steps, time.process_time() - start)


def simulate_on(so_far: SimulationSums, scenarios: int, console: Console) -> None:
    """More scenarios of whole simulations."""
    for _ in track(range(scenarios), "simulated scenarios", console=console):
        seed = so_far.next_seed
        try:
            violations = so_far.add(seed)
        except Exception as error:
            so_far.violations, violations = 1, [f"{type(error).__name__}: {error}"]
        if violations:
            console.print(f"[red]python -m tests.simulation --seed {seed}: {violations[0]}", soft_wrap=True)
            raise typer.Exit(1)


def kill_schedulers(so_far: KillSums, count: int, console: Console) -> None:
    """More kills of a scheduler under load."""
    rounds = range(-(-count // KILLS_PER_SEED))
    try:
        for done in kill_on(so_far, track(rounds, f"times {KILLS_PER_SEED} kills of the scheduler", console=console)):
            console.print(str(done))
    except Exception as error:
        console.print(f"[red]scheduler kills, seed {so_far.next_seed}: {type(error).__name__}: {error}", soft_wrap=True)
        raise typer.Exit(1) from error


def run_tests(passed: Passed, count: int, console: Console) -> None:
    """So many of the tests of this tier."""
    names = longest_ago(passed, collected())[:count]
    try:
        for done in test_on(passed, track(names, "tests of the soak", console=console)):
            console.print(done, soft_wrap=True)
    except AssertionError as error:
        console.print(f"failed: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error


def main(
    lives: Annotated[int, typer.Option(min=0, help="lives under each preset in this run")] = 200,
    scenarios: Annotated[int, typer.Option(min=0, help="simulated scenarios in this run")] = 5_000,
    scheduler_kills: Annotated[int, typer.Option(min=0, help="kills of a real scheduler in this run, by the ten")] = 0,
    tests: Annotated[
        int, typer.Option(min=0, help="tests marked `soak` in this run, those not run for longest first")
    ] = 0,
) -> None:
    """Random lives of the scheduler core and simulated scenarios, going on where the last run ended."""
    console = Console(stderr=True)
    sums, simulation, kills, passed = read()
    try:
        live_on(sums, lives, console)
        simulate_on(simulation, scenarios, console)
        if scheduler_kills:
            kill_schedulers(kills, scheduler_kills, console)
        if tests:
            run_tests(passed, tests, console)
    except KeyboardInterrupt:
        console.print("stopped; what was done is kept")
    finally:
        write(sums, simulation, kills, passed)
    for name, so_far in sums.items():
        print(f"{name}: {so_far.lives} lives, {so_far.steps} steps, {so_far.cpu_s:.0f} s")
    print(f"simulation: {simulation.scenarios} scenarios, {simulation.steps} steps, {simulation.cpu_s:.0f} s")
    print(
        f"kills of the scheduler: {kills.kills}, {kills.requests} requests, {kills.tokens} tokens, {kills.seconds:.0f} s"
    )
    print(f"tests of the soak that have passed: {len(passed)}")


if __name__ == "__main__":
    sys.exit(typer.run(main))
