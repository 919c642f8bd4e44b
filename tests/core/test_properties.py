"""Random lives of the core under each preset: nothing leaks, nothing is lost or repeated, everything ends exactly once."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.core.lives import FATES, Life
from tests.support.core.preset_lives import POLICIES, live
from tests.support.core.random_policies import random_setting

ROOT = Path(__file__).parents[2]
Record = Callable[[str, object], None]


class CoreMachine(RuleBasedStateMachine):
    """Arrivals, steps, aborts, stop strings, failures and lost workers in any order (R35, R198, R200)."""

    policy: str

    @initialize(rng=st.randoms(use_true_random=False))
    def build(self, rng: random.Random) -> None:
        self.life = Life(random_setting(self.policy, rng))

    @rule(rng=st.randoms(use_true_random=False))
    def arrive(self, rng: random.Random) -> None:
        self.life.arrive(rng)

    @precondition(lambda self: self.life.can_schedule)
    @rule(fate=st.sampled_from(FATES))
    def schedule(self, fate: str) -> None:
        self.life.schedule(fate)

    @precondition(lambda self: self.life.num_underway)
    @rule()
    def finish(self) -> None:
        self.life.finish()

    @rule(rng=st.randoms(use_true_random=False))
    def guess(self, rng: random.Random) -> None:
        self.life.guess(rng)

    @rule(which=st.integers(0, 12))
    def abort(self, which: int) -> None:
        self.life.abort(which)

    @rule(which=st.integers(0, 12), index=st.integers(0, 2), num=st.integers(1, 6))
    def stop_string(self, which: int, index: int, num: int) -> None:
        self.life.stop_string(which, index, num)

    @rule()
    def reset_prefixes(self) -> None:
        self.life.reset_prefixes()

    @rule(on=st.booleans())
    def warm_up(self, on: bool) -> None:
        self.life.warm_up(on=on)

    @rule()
    def lose_worker(self) -> None:
        self.life.lose_worker()

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "life"):
            self.life.check()

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.life.drain()


def live_in_any_order(policy: str, num_lives: int) -> str:
    """So many lives of the machine; what was done, for the report of sizes."""
    machine = type("Machine", (CoreMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(max_examples=num_lives, stateful_step_count=50, deadline=None))
    return f"core under {policy}: {num_lives} lives of up to 50 events in any order"


@pytest.mark.parametrize("policy", POLICIES)
def test_any_order_of_events(policy: str, record_property: Record) -> None:
    """R3, R28, R35, R97, R198, R200: whatever happens in whatever order, with a small counter-example where it fails."""
    record_property("size", live_in_any_order(policy, 4))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("policy", POLICIES)
def test_any_order_of_many_events(policy: str, record_property: Record) -> None:
    """The same in many more lives."""
    record_property("size", live_in_any_order(policy, 150))


def live_for(policy: str, num_steps: int, first_seed: int) -> str:
    """Lives until so many steps were planned; what was done, for the report of sizes."""
    start, done, seed = time.process_time(), 0, first_seed
    while done < num_steps:
        try:
            done += live(policy, seed).num_steps
        except Exception as error:
            error.add_note(f"live({policy!r}, {seed})")
            raise
        seed += 1
    return f"core under {policy}: {done} random steps in {seed - first_seed} lives, {time.process_time() - start:.0f} s"


@pytest.mark.parametrize("policy", POLICIES)
def test_many_steps(policy: str, record_property: Record) -> None:
    """R3, R28, R97, R198, R200, R208: 4,000 random steps over all presets."""
    record_property("size", live_for(policy, 400, 0))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("policy", POLICIES)
def test_very_many_steps(policy: str, record_property: Record) -> None:
    """R3, R28, R97, R198, R200, R208: 1,000,000 random steps over all presets."""
    record_property("size", live_for(policy, 100_000, 1_000_000))


@pytest.fixture(scope="module")
def planned() -> list[dict[str, list[str]]]:
    """Plans of a life by policy, made in this process and in one that hashes differently."""
    command = [sys.executable, "-m", "tests.core.test_properties", "1"]
    environ = {**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, timeout=250, check=True)
    return [plans_by_policy(1), json.loads(done.stdout)]


def plans_by_policy(num_lives: int) -> dict[str, list[str]]:
    """Plans of the first lives under each policy."""
    return {policy: [plan for seed in range(num_lives) for plan in live(policy, seed).plans] for policy in POLICIES}


@pytest.mark.processes
@pytest.mark.parametrize("policy", POLICIES)
def test_equal_inputs_give_equal_plans(policy: str, planned: list[dict[str, list[str]]]) -> None:
    """R201: whatever the process hashes with, the same calls give the same plans."""
    one, other = (plans[policy] for plans in planned)
    assert sum(map(len, one)) > 600
    assert one == other


if __name__ == "__main__":
    json.dump(plans_by_policy(int(sys.argv[1])), sys.stdout)
