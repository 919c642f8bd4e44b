"""P2: the worker, with a real model, is killed in the middle of a stream and started again; the stream goes on (design.md 8)."""

from quire import SamplingParams
from tests.e2e.supervised import Case, kills, read_all, supervised

_CASE = Case("class Node:", SamplingParams(temperature=0.9, seed=5, max_tokens=200, ignore_eos=True))


def test_a_stream_survives_the_death_of_the_worker() -> None:
    """kill -9 and a restart: every token exactly once, the same as in an undisturbed run, and no error."""
    with supervised() as running:
        undisturbed = read_all(running.stack.grpc_address, [_CASE])
        disturb = kills(running, "worker", 1, 200, seed=4)
        assert read_all(running.stack.grpc_address, [_CASE], disturb) == undisturbed
        assert len(running.deaths) == 1 and len(undisturbed[0][0]) == 200
