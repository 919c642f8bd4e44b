"""The scheduler is killed under load and started again; gateways keep their clients' streams, which go on.

A sample here, 50 kills in `make test-long`, as many as you like in `make soak ARGS="--scheduler-kills N"`; sizes are printed.
"""

from collections.abc import Callable

import pytest

from tests.support.stack import kill_requests, scheduler_kills
from tests.support.stack.supervised import Supervised

Record = Callable[[str, object], None]
SAMPLE, WHOLE = 3, 50


def survive(running: Supervised, count: int, seed: int) -> scheduler_kills.Survived:
    """So many kills while all kinds of requests go on, compared with what they gave before."""
    address = running.stack.grpc_address
    wanted = scheduler_kills.cases(address)
    expected = kill_requests.undisturbed(address, wanted)
    assert expected["stop string"][0].stop_reason == wanted["stop string"].params.stop[0]
    return scheduler_kills.survive(running, wanted, expected, count, seed)


def test_kills_under_load_lose_no_token(killable: Supervised, record_property: Record) -> None:
    """R25: kill -9: n = 2, beams, a schema, penalties, log probabilities, stop strings, min_tokens; each token once, the same."""
    record_property("size", str(survive(killable, SAMPLE, seed=1)))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_many_kills_under_load(killable: Supervised, record_property: Record) -> None:
    """The same many times over."""
    record_property("size", str(survive(killable, WHOLE, seed=2)))
