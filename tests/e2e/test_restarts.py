"""Services are killed and stopped under running streams and started again; the streams go on."""

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from quire import SamplingParams
from quire.client.sync_client import Client
from svc_common.errors import Unavailable
from tests.support.stack.kill_plan import Killer
from tests.support.stack.kill_signs import LOSS
from tests.support.stack.supervised import (
    NOTICED_S,
    Case,
    Readings,
    Supervised,
    is_serving,
    kills,
    read_all,
    supervised,
)

Record = Callable[[str, object], None]
NUM_TOKENS = 120


def cases(num_tokens: int) -> list[Case]:
    """Greedy, drawn, two choices, and a prompt of several blocks."""
    fixed = {"max_tokens": num_tokens, "ignore_eos": True}
    return [
        Case("class Node:", SamplingParams(temperature=0, **fixed)),
        Case("import ", SamplingParams(temperature=0.9, seed=5, **fixed)),
        Case("def main():", SamplingParams(temperature=1.0, top_p=0.9, seed=6, n=2, **fixed)),
        Case("x = [1, 2, 3]\n" * 20, SamplingParams(temperature=0.7, top_k=20, seed=7, **fixed)),
    ]


def total(found: list[list[list[int]]]) -> int:
    """Tokens of all choices."""
    return sum(len(tokens) for choices in found for tokens in choices)


@pytest.fixture(scope="module")
def killer(tmp_path_factory: pytest.TempPathFactory) -> Killer:
    """Kills the worker from within."""
    return Killer(tmp_path_factory.mktemp("kills"))


@pytest.fixture(scope="module")
def simulated(killer: Killer) -> Iterator[Supervised]:
    """Services with a simulated worker: it draws each token from what its cache holds, so a lost one shows."""
    with supervised(simulated=True, environ=killer.environ) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(simulated: Supervised) -> list[list[list[int]]]:
    """What the cases give while nothing happens."""
    found = read_all(simulated.stack.grpc_address, cases(NUM_TOKENS))
    assert simulated.deaths == [] and total(found) == 5 * NUM_TOKENS
    return found


def test_kills_of_the_worker(
    simulated: Supervised, undisturbed: list[list[list[int]]], record_property: Record
) -> None:
    """kill -9 at random moments of running streams: every token exactly once, the same as in an undisturbed run, and no error."""
    before = len(simulated.deaths)
    disturb = kills(simulated, "worker", 2, total(undisturbed), seed=1)
    assert read_all(simulated.stack.grpc_address, cases(NUM_TOKENS), disturb) == undisturbed
    deaths = simulated.deaths[before:]
    assert len(deaths) == 2 and all("was killed by signal 9" in death for death in deaths)
    record_property(
        "size", f"kills of a worker, simulated: {len(deaths)}, {total(undisturbed)} tokens, 0 lost or changed"
    )


def test_a_worker_that_lost_its_device_is_started_again(
    simulated: Supervised, undisturbed: list[list[list[int]]], killer: Killer
) -> None:
    """Nothing but a restart helps, so it ends by itself, with a status and the reason; the streams go on."""
    before = len(simulated.deaths)

    def lose(readings: Readings) -> None:
        readings.wait_for(200)
        killer.end_at(LOSS, readings)

    assert read_all(simulated.stack.grpc_address, cases(NUM_TOKENS), lose) == undisturbed
    [death] = simulated.deaths[before:]
    assert "ended with status 1: the engine is lost: the bus fell off" in death


def test_a_gateway_that_died_serves_again_at_its_address(
    simulated: Supervised, undisturbed: list[list[list[int]]]
) -> None:
    """Its streams end with UNAVAILABLE, as no other service holds them; the same client's next request is served."""
    [endless, *_], [case, *_] = cases(2000), cases(NUM_TOKENS)
    with Client(simulated.stack.grpc_address) as client:
        stream = iter(client.generate_stream(endless.prompt, endless.params, timeout_s=60))
        next(stream)
        old = simulated.kill("gateway")
        with pytest.raises(Unavailable):
            list(stream)
        deadline = time.monotonic() + 30
        while not is_serving(simulated.stack.grpc_address):
            assert time.monotonic() < deadline, "the gateway does not come back"
            time.sleep(0.05)
        assert simulated.stack.pids["gateway"] != old
        output = client.generate(case.prompt, case.params, timeout_s=60)
    assert [output.outputs[0].token_ids] == undisturbed[0]


def test_a_stopped_worker_is_noticed_and_goes_on(
    simulated: Supervised, undisturbed: list[list[list[int]]], record_property: Record
) -> None:
    """SIGSTOP in mid-stream: the scheduler's health says so in seconds; after SIGCONT the same process goes on, nothing is lost."""
    before, noticed_s = list(simulated.deaths), []

    def stop_and_go_on(readings: Readings) -> None:
        readings.wait_for(200)
        pid = simulated.kill("worker", signal.SIGSTOP)
        noticed_s.append(seconds_until(lambda: not is_serving(simulated.stack.scheduler_address)))
        time.sleep(1.0)
        os.kill(pid, signal.SIGCONT)

    assert read_all(simulated.stack.grpc_address, cases(NUM_TOKENS), stop_and_go_on) == undisturbed
    assert simulated.deaths == before, "a stopped process is not dead"
    assert noticed_s[0] < NOTICED_S
    record_property("size", f"a stopped worker was noticed after {noticed_s[0]:.2f} s")


def test_a_stopped_worker_that_is_killed_is_started_again(
    simulated: Supervised, undisturbed: list[list[list[int]]]
) -> None:
    """What an operator does with a process that hangs: its sequences are computed again by the next one."""
    before = len(simulated.deaths)

    def stop_and_kill(readings: Readings) -> None:
        readings.wait_for(200)
        simulated.kill("worker", signal.SIGSTOP)
        time.sleep(0.2)
        simulated.kill("worker")

    assert read_all(simulated.stack.grpc_address, cases(NUM_TOKENS), stop_and_kill) == undisturbed
    assert len(simulated.deaths) == before + 1


def seconds_until(condition: Callable[[], bool]) -> float:
    """How long it takes until it is true; AssertionError after 30 s."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < 30, "not within 30 s"
        time.sleep(0.02)
    return time.monotonic() - begin
