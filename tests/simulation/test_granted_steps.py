"""Grants in whole simulated systems: simple ones, and those of real messages, ownership and grants of the worker."""

from collections.abc import Callable, Sequence

import pytest

from tests.simulation.granting_runs import (
    GrantCounts,
    GrantingScenario,
    granting_scenario,
    violations_of,
    wire_violations_of,
)
from tests.support.core.granting_lives import GRANTING

Record = Callable[[str, object], None]
Judge = Callable[[GrantingScenario, GrantCounts], Sequence[str]]
JUDGES = [pytest.param(violations_of, id="simulated"), pytest.param(wire_violations_of, id="wire")]


def _judged(judge: Judge, policy: str, count: int) -> str:
    counts = GrantCounts()
    for seed in range(count):
        violations = judge(granting_scenario(seed, policy), counts)
        assert not violations, f"{judge.__name__} of granting_scenario({seed}, {policy!r}): {violations[:3]}"
    assert counts.num_repeats > counts.num_steps / 4 and counts.num_revocations >= count / 6
    return f"grants under {policy}, {judge.__name__}: {count} scenarios, {counts}"


@pytest.mark.parametrize("policy", GRANTING)
@pytest.mark.parametrize("judge", JUDGES)
def test_every_request_gets_its_tokens_once(judge: Judge, policy: str, record_property: Record) -> None:
    """Deaths, broken streams, rivals, cancels, deadlines, stop strings and arrivals at any moment: tokens and ends are those of
    each request alone, and nothing is left at the worker."""
    record_property("size", _judged(judge, policy, 5))


@pytest.mark.long
@pytest.mark.parametrize("policy", GRANTING)
@pytest.mark.parametrize("judge", JUDGES)
def test_many_scenarios(judge: Judge, policy: str, record_property: Record) -> None:
    """The same in more of them."""
    record_property("size", _judged(judge, policy, 100))


def test_a_plan_that_is_not_sent_takes_no_endings() -> None:
    """A request ends while the last granted step runs: the worker forgets its row although none comes after it."""
    counts = GrantCounts()
    assert not wire_violations_of(granting_scenario(32, "vllm-v1"), counts)
    assert counts.num_repeats
