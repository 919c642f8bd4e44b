"""Workers with a real model are killed at random and at chosen moments, and started again; all streams go on.

A sample here, 50 kills in `make test-long`; sizes are printed. Each chosen moment says itself that it came.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from quire.client.sync_client import Client
from svc_common.errors import Unavailable
from tests.support.stack import kill_requests
from tests.support.stack.commands import blocks
from tests.support.stack.kill_plan import AT_RANDOM, Killer
from tests.support.stack.kill_signs import LOSS, POISON, POISON_TOKEN
from tests.support.stack.supervised import NOTICED_S, Readings, Supervised, is_serving, supervised

Record = Callable[[str, object], None]
TIGHT = ("--dtype", "float32", "--max-model-len", "256", "--swap-space", "8MiB", "--num-gpu-blocks-override", "30")
"""Few blocks, so that sequences are preempted, and shared blocks are copied."""


@dataclass(frozen=True)
class Plan:
    """A policy, and how often a worker is killed at which moment."""

    policy: str
    moments: Counter[str]
    sets: tuple[str, ...] = ()
    scheduler_args: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.policy, *self.sets))


SAMPLE = Plan("quire", Counter({"copy": 1}))
"""On the stack that other tests kill as well: a worker starts once, not twice."""
WHOLE = [
    Plan(
        "quire",
        Counter({"middle chunk": 4, "swap out": 2, "copy": 3, "grammar": 3, "beams": 2, "penalties": 2, AT_RANDOM: 4}),
        ("restraint=null", "preemption_mode=swap"),
        ("--max-num-batched-tokens", "64", "--max-worker-losses", "50"),
    ),
    Plan(
        "vllm-v0",
        Counter({"swap out": 5, "swap in": 3, "copy": 3, "grammar": 2, "fork": 2, "answer": 2, AT_RANDOM: 3}),
        ("preemption_mode=swap",),
    ),
    Plan(
        "vllm-v0-chunked",
        Counter({"middle chunk": 3, "fork": 2, "grammar": 2, AT_RANDOM: 3}),
        scheduler_args=("--max-num-batched-tokens", "64", "--max-worker-losses", "50"),
    ),
]


def survive(running: Supervised, killer: Killer, plan: Plan) -> str:
    """Kills by plan while requests of all kinds go on; what was done."""
    before, address, cases = len(running.deaths), running.stack.grpc_address, kill_requests.cases()
    expected = kill_requests.undisturbed(address, cases)
    kill = killer.kills(running, list(plan.moments.elements()), seed=1)
    num_requests, num_tokens = kill_requests.repeat(address, cases, expected, kill)
    pool, deaths = blocks(running.stack.admin_address)["gpu"], running.deaths[before:]
    assert killer.counts + Counter({AT_RANDOM: plan.moments[AT_RANDOM]}) == plan.moments
    assert len(deaths) == plan.moments.total()
    assert all("was killed by signal 9" in death for death in deaths)
    assert pool["free"] == pool["total"]
    kinds = ", ".join(f"{count} {moment}" for moment, count in sorted(plan.moments.items()))
    return (
        f"kills of a worker, models/tiny, {plan}: {plan.moments.total()} ({kinds}); {num_requests} requests, "
        f"{num_tokens} tokens, 0 lost or changed"
    )


def started(plan: Plan, folder: Path) -> str:
    """The same on a stack of the plan's own, with few blocks."""
    killer = Killer(folder)
    with supervised(
        environ=killer.environ,
        policy=plan.policy,
        policy_set=plan.sets,
        scheduler_args=("--max-num-seqs", "16", *plan.scheduler_args),
        worker_args=TIGHT,
    ) as running:
        return survive(running, killer, plan)


def test_a_kill_at_a_chosen_moment_loses_no_token(
    killable: Supervised, killer: Killer, record_property: Record
) -> None:
    """R3, R123: kill -9 within a copy: every token exactly once, and the same."""
    record_property("size", survive(killable, killer, SAMPLE))


def test_the_plan_has_fifty_kills() -> None:
    """As many as promised, each moment several times."""
    moments = sum((plan.moments for plan in WHOLE), Counter[str]())
    assert moments.total() == 50 and min(moments.values()) >= 2


@pytest.mark.long
@pytest.mark.timeout(600)
def test_whatever_else_befalls_a_worker(tmp_path: Path, record_property: Record) -> None:
    """Stopped and continued, stopped and killed, its device lost; poison, which fails alone after five workers."""
    killer, cases = Killer(tmp_path), kill_requests.cases()
    with supervised(environ=killer.environ, worker_args=TIGHT) as running:
        address = running.stack.grpc_address
        expected = kill_requests.undisturbed(address, cases)

        def befall(readings: Readings) -> None:
            for harm in (stop_and_go_on, stop_and_kill, lose_device, poison):
                readings.wait_for(readings.num_tokens + 100)
                harm(killer, running, readings)

        num_requests, num_tokens = kill_requests.repeat(address, cases, expected, befall)
    assert killer.counts == {LOSS: 1, POISON: 5} and len(running.deaths) == 7
    assert sum("ended with status 1: the engine is lost" in death for death in running.deaths) == 1, running.deaths
    record_property(
        "size", f"other ends of a worker, models/tiny: {num_requests} requests, {num_tokens} tokens, as ever"
    )


def stop_and_go_on(killer: Killer, running: Supervised, readings: Readings) -> None:
    """SIGSTOP is noticed; after SIGCONT the same process goes on."""
    begin, pid = time.monotonic(), running.kill("worker", signal.SIGSTOP)
    while is_serving(running.stack.scheduler_address):
        assert time.monotonic() < begin + NOTICED_S
        time.sleep(0.02)
    os.kill(pid, signal.SIGCONT)


def stop_and_kill(killer: Killer, running: Supervised, readings: Readings) -> None:
    """A process that hangs, and the end of it."""
    running.kill("worker", signal.SIGSTOP)
    time.sleep(0.5)
    running.kill("worker")


def lose_device(killer: Killer, running: Supervised, readings: Readings) -> None:
    """The worker ends by itself."""
    killer.end_at(LOSS, readings)


def poison(killer: Killer, running: Supervised, readings: Readings) -> None:
    """A request that kills each worker that runs it, among others. It is sent again if no worker has come up for too long."""
    killer.arm(POISON)
    with Client(running.stack.grpc_address) as client:
        for _ in range(10):
            with pytest.raises(Unavailable) as refused:
                client.generate([POISON_TOKEN, 5, 6, 7], timeout_s=120)
            if "cannot be reached" not in str(refused.value):
                break
    assert "5 workers in a row were lost" in str(refused.value)
    killer.disarm()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plan", WHOLE, ids=str)
def test_every_kill_moment_of_the_plan(plan: Plan, tmp_path: Path, record_property: Record) -> None:
    """R3, R27, R123: at every moment, under policies that swap and that recompute, with chunks and without."""
    record_property("size", started(plan, tmp_path))
