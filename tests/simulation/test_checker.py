"""The outside checker can fail: runs that were tampered with, and cores that break their promises, are found out."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from block_manager.hashing import HashChain
from block_manager.pool import BlockPool
from scheduler_svc.core.outputs import AtOnce
from scheduler_svc.core.plan import StepOutcome, StepPlan
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state import CoreState
from tests.simulation.checker import Promise, judge
from tests.simulation.runs import expected_streams, live, promise, run
from tests.simulation.scenarios import scenario
from tests.simulation.transcript import Ended, Fact, Got, Left, LostWorker, Planned

Facts = list[Fact]
POLICY = "vllm-v1"
SEEDS = range(30)


@pytest.fixture(scope="module")
def honest() -> tuple[Facts, Promise]:
    """A run in which much happens, and what was promised; no stop strings, behind which tokens do not matter."""
    for given in (scenario(seed, POLICY) for seed in range(100)):
        facts = live(given, [replace(arrival, stop_string_at=None) for arrival in given.arrivals()])[0].facts
        kinds = Counter(type(fact) for fact in facts)
        if kinds[Ended] > 8 and kinds[Got] > 40 and kinds[LostWorker]:
            return facts, promise(given, expected_streams(given))
    raise AssertionError("no scenario in which much happens")


def test_an_honest_run_is_found_honest(honest: tuple[Facts, Promise]) -> None:
    """R200: the checker is content with what is right."""
    assert judge(*honest) == []


def pick(facts: Facts, kind: type[Fact], rng: random.Random) -> int:
    """Where one of these is."""
    return rng.choice([at for at, fact in enumerate(facts) if isinstance(fact, kind)])


def loses_tokens(facts: Facts, rng: random.Random) -> None:
    del facts[pick(facts, Got, rng)]


def repeats_tokens(facts: Facts, rng: random.Random) -> None:
    at = pick(facts, Got, rng)
    facts.insert(at, facts[at])


def changes_a_token(facts: Facts, rng: random.Random) -> None:
    at = pick(facts, Got, rng)
    got = facts[at]
    assert isinstance(got, Got)
    facts[at] = replace(got, tokens=(got.tokens[0] + 1, *got.tokens[1:]))


def ends_twice(facts: Facts, rng: random.Random) -> None:
    at = pick(facts, Ended, rng)
    facts.insert(at, facts[at])


def never_ends(facts: Facts, rng: random.Random) -> None:
    del facts[rng.choice([at for at, fact in enumerate(facts) if isinstance(fact, Ended) and fact.last])]


def schedules_the_dead(facts: Facts, rng: random.Random) -> None:
    at, plan = pick(facts, Ended, rng), facts[pick(facts, Planned, rng)]
    ended = facts[at]
    assert isinstance(ended, Ended)
    assert isinstance(plan, Planned)
    facts.insert(at + 1, replace(plan, shares=((ended.name, ended.request_id, 1),)))


def exceeds_the_budget(facts: Facts, rng: random.Random) -> None:
    at = pick(facts, Planned, rng)
    plan = facts[at]
    assert isinstance(plan, Planned)
    facts[at] = replace(plan, taken=1_000)


def keeps_a_block(facts: Facts, rng: random.Random) -> None:
    at = pick(facts, Left, rng)
    left = facts[at]
    assert isinstance(left, Left)
    facts[at] = replace(left, device_blocks=1)


def stops_early(facts: Facts, rng: random.Random) -> None:
    del facts[pick(facts, Left, rng)]


TAMPERS = (
    loses_tokens,
    repeats_tokens,
    changes_a_token,
    ends_twice,
    never_ends,
    schedules_the_dead,
    exceeds_the_budget,
    keeps_a_block,
    stops_early,
)


@pytest.mark.parametrize("tamper", TAMPERS)
def test_tampered_runs_are_found_out(
    honest: tuple[Facts, Promise], tamper: Callable[[Facts, random.Random], None]
) -> None:
    """R3, R97, R200: a lost or repeated token, a second end, work for an ended request, a block in use: each is detected."""
    facts, promised = honest
    for seed in range(20):
        changed = list(facts)
        tamper(changed, random.Random(seed))
        assert judge(changed, promised), f"{tamper.__name__} at {seed}"


# --- cores that break their promises ----------------------------------------------------------------------------------


def forget_to_release(patch: pytest.MonkeyPatch) -> None:
    """A request that ends by itself keeps its blocks."""
    patch.setattr(CoreState, "retire", CoreState.end)


def lose_every_tenth_token(patch: pytest.MonkeyPatch) -> None:
    """A token is in the sequence, and in no run."""
    update, count = Scheduler.update, iter(range(1_000_000))

    def lossy(self: Scheduler, *args: object, **kwargs: object) -> StepOutcome:
        outcome = update(self, *args, **kwargs)  # type: ignore[arg-type]
        if outcome.entries and next(count) % 10 == 0:
            outcome.entries.pop()
            outcome.tickets = outcome.tickets[: len(outcome.entries)]
        return outcome

    patch.setattr(Scheduler, "update", lossy)


def tell_ends_twice(patch: pytest.MonkeyPatch) -> None:
    """Each result's ends come twice."""
    apply = AtOnce.apply_group

    def repeating(self: AtOnce, *args: Any) -> None:
        outcome: StepOutcome = args[-1]
        before = len(outcome.ended)
        apply(self, *args)
        outcome.ended += outcome.ended[before:]

    patch.setattr(AtOnce, "apply_group", repeating)


def mix_prefixes_up(patch: pytest.MonkeyPatch) -> None:
    """A block is found by its own tokens, whatever came before them."""

    def upto(self: HashChain, token_ids: list[int], num_blocks: int) -> list[bytes]:
        size = self._block_size
        for start in range(len(self._hashes) * size, num_blocks * size, size):
            self._hashes.append(repr(token_ids[start : start + size]).encode())
        return self._hashes

    patch.setattr(HashChain, "upto", upto)


def free_too_early(patch: pytest.MonkeyPatch) -> None:
    """A sequence's first block is on the free list while the sequence runs."""
    append = PlanBuilder.extend

    def careless(
        self: PlanBuilder, sequence: Sequence, num_tokens: int, state: CoreState, num_lookahead: int = 0
    ) -> None:
        append(self, sequence, num_tokens, state, num_lookahead)
        ledger = state.cache.ledger
        block = ledger.tables[sequence.name][0]
        if ledger.gpu.refs[block] == 1:
            ledger.gpu.refs[block] = 0
            ledger.gpu._free([block])

    patch.setattr(PlanBuilder, "extend", careless)
    patch.setattr(BlockPool, "release", lambda self, blocks: None)


def forget_the_lost_worker(patch: pytest.MonkeyPatch) -> None:
    """A new worker is taken for the old one."""
    patch.setattr(Scheduler, "reset_sequences_of_lost_worker", lambda self, worker: None)


def never_report_ended_rows(patch: pytest.MonkeyPatch) -> None:
    """The worker keeps rows of those that are over."""
    schedule = Scheduler.schedule

    def forgetful(self: Scheduler, now: float, worker: int | None = None) -> list[StepPlan]:
        plans = schedule(self, now, worker)
        for plan in plans:
            plan.left.clear()
        return plans

    patch.setattr(Scheduler, "schedule", forgetful)


SABOTAGE = (
    (forget_to_release, "device blocks are in use"),
    (lose_every_tenth_token, "were lost or came twice"),
    (tell_ends_twice, "ended twice"),
    (mix_prefixes_up, "reads in the block"),
    (free_too_early, "reads in the block"),
    (forget_the_lost_worker, "never ended"),
    (never_report_ended_rows, "rows are in use"),
)


@pytest.fixture(scope="module")
def unbroken() -> list[str]:
    """What the checker objects to in the scenarios as they are."""
    return [violation for seed in SEEDS for violation in run(scenario(seed, POLICY)).violations]


@pytest.mark.parametrize(("sabotage", "finding"), SABOTAGE)
def test_broken_cores_are_found_out(
    sabotage: Callable[[pytest.MonkeyPatch], None], finding: str, unbroken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R3, R97, R200: with a defect built into core or ledger, scenarios fail that are right without it, for the right reason."""
    assert unbroken == []
    sabotage(monkeypatch)
    found = (violation for seed in SEEDS for violation in findings(seed))
    assert any(finding in violation for violation in found)


def findings(seed: int) -> list[str]:
    """What the checker objects to; nothing where the run breaks down by itself."""
    try:
        return run(scenario(seed, POLICY)).violations
    except (AssertionError, KeyError, ValueError, IndexError):
        return []
