"""The benchmarks of streams, overload and tenants: their arithmetic, and small runs of them."""

import pytest

from benchmarks import tenants
from benchmarks.open_load import Flow, Sent, figures
from benchmarks.overload import _run
from benchmarks.report import spread
from benchmarks.service import Stack
from benchmarks.streams import __main__ as streams


def test_what_counts_of_a_run() -> None:
    """Not its first tenth; goodput counts ends within it; refusals are told apart from other ends."""
    sent = [
        Sent("a", 0.5, first_s=0.6, over_s=0.9, end="ended"),
        Sent("a", 2.0, first_s=2.2, over_s=3.0, end="ended"),
        Sent("a", 9.0, first_s=9.4, over_s=11.0, end="ended"),
        Sent("a", 5.0, over_s=5.01, end="RESOURCE_EXHAUSTED QUEUE_FULL", has_retry_time=True),
        Sent("a", 5.0, over_s=7.0, end="UNAVAILABLE NO_MODEL"),
    ]
    found = figures(sent, 10.0)
    assert found["calls"] == 4 and found["served_per_s"] == pytest.approx(1 / 9, abs=0.01)
    assert found["ttft_s"] == {"p50": 0.3, "p99": 0.398, "max": 0.4}
    assert found["refused_s"]["max"] == 0.01 and found["refused_with_retry_time"] == 1
    assert found["ends"] == {"ended": 2, "RESOURCE_EXHAUSTED QUEUE_FULL": 1, "UNAVAILABLE NO_MODEL": 1}
    assert spread([]) == {}


@pytest.mark.long
def test_a_small_overload() -> None:
    """Three processes, twice as many clients as fit: some are served, some refused with a time, nothing else."""
    worker = {"step_base_s": 0.02, "num_gpu_blocks": 512}
    with Stack(worker, {"max_num_seqs": 2, "max_waiting_requests": 2}) as stack:
        found = _run(stack.address, Flow("all", 60.0, output=8), 1.5, 1)
    assert set(found["ends"]) == {"ended", "RESOURCE_EXHAUSTED QUEUE_FULL"}
    assert found["refused_with_retry_time"] == found["ends"]["RESOURCE_EXHAUSTED QUEUE_FULL"]


@pytest.mark.long
def test_a_few_streams() -> None:
    """All end, those that are not read too; memory is read."""
    found = streams.measure(40, 4, 4, 0.05, 1)
    [client] = found["clients"]
    assert client["ends"] == {"ended": 36, "slow: ended": 4} and client["gaps_s"]["p99"] > 0
    assert found["rss_open_mib"] > 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_quiet_tenant_beside_a_flood_is_never_refused() -> None:
    """Three processes, a tenth of capacity beside three times capacity: all of the first is served, the second refused in part."""
    found = tenants.overload(45.0, 32, 2.0, 1)["ends"]
    assert set(found["quiet"]) == {"ended"} and found["quiet"]["ended"] > 20, found
    assert found["flood"]["RESOURCE_EXHAUSTED QUEUE_FULL"] > found["flood"]["ended"] / 2
