"""Workers behind a real DNS server that join and vanish while requests run: none is sent to a stale address for long, all end."""

import json
from collections.abc import Callable

import pytest

from tests.support.dns import churn
from tests.support.dns.server import run_inside


def check(adds: int, removes: int, life_s: float, lookup_s: float, record: Callable[[str, object], None]) -> None:
    arguments = [str(value) for value in (adds, removes, life_s, lookup_s)]
    seen = json.loads(run_inside(churn.__name__, *arguments, timeout_s=20 * life_s + 240).splitlines()[-1])
    record("size", f"{adds} workers added and {removes} removed: {seen}")
    assert seen["requests"] > 0
    assert (seen["failed"], seen["without_all_tokens"]) == ([], 0)
    assert seen["violations"] == []


@pytest.mark.processes
def test_no_request_starts_at_a_stale_address(record_property: Callable[[str, object], None]) -> None:
    """A minute of the long test in two seconds, with lookups as much more often."""
    check(10, 6, 2.0, 0.1, record_property)


@pytest.mark.long
@pytest.mark.timeout(3_600)
def test_no_request_starts_at_a_stale_address_for_twelve_minutes(
    record_property: Callable[[str, object], None],
) -> None:
    """248 additions and 149 removals in 12 minutes, the rate that operators of large fleets report, with the default interval."""
    check(248, 149, 720.0, 1.0, record_property)
