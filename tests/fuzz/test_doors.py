"""Hostile input over both doors (100,000 inputs, no crash, no INTERNAL, UNKNOWN or 500, no leak)."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import pytest

from quire.local_stack.stack import LocalStack
from tests.fuzz import campaign, traces

SEED = 20_261_122
NUM_QUICK, NUM_LONG = 250, 100_000
NUM_PARTS, EARLY, LATE = 10, slice(3, 6), slice(6, 10)
MOST_GROWTH_BYTES = 32 * 2**20


def _assert_unharmed(stack: LocalStack, log: traces.Log, account: campaign.Account) -> None:
    assert account.wrong == [], "\n".join(account.wrong)
    traces.wait_until_nothing_is_left(stack)
    assert log.errors == [], "\n".join(log.errors)


def test_some(stack: LocalStack, log: traces.Log, record_property: Callable[[str, object], None]) -> None:
    """Each answer is a result or a typed error with its details; afterwards nothing is left."""
    account = asyncio.run(campaign.run(stack, NUM_QUICK, SEED))
    _assert_unharmed(stack, log, account)
    assert account.ended["OK"] > NUM_QUICK / 20 and account.ended["INVALID_ARGUMENT"] > NUM_QUICK / 20
    record_property("size", f"fuzzed inputs over both doors: {NUM_QUICK}")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_many(stack: LocalStack, log: traces.Log, record_property: Callable[[str, object], None]) -> None:
    """The same of many; memory does not grow with them. The least of a few sizes counts: some grammars take much for a while."""
    began, sizes, ends = time.monotonic(), [], Counter[str]()
    for part in range(NUM_PARTS):
        account = asyncio.run(campaign.run(stack, NUM_LONG // NUM_PARTS, SEED + 1 + part))
        _assert_unharmed(stack, log, account)
        sizes.append(traces.resident_bytes(stack))
        ends += account.ended
    growth = {name: min(s[name] for s in sizes[LATE]) - min(s[name] for s in sizes[EARLY]) for name in sizes[0]}
    assert max(growth.values()) < MOST_GROWTH_BYTES, sizes
    record_property(
        "size",
        f"fuzzed inputs over both doors: {ends.total()} in {time.monotonic() - began:.0f} s, ended {dict(ends)}; memory grew by "
        f"{ {name: f'{size / 2**20:.0f} MiB' for name, size in growth.items()} }",
    )
