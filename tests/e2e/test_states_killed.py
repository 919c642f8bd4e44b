"""Workers and schedulers of a model with states are killed while requests stream: states are lost, or their steps are not answered,
and every token is that of an undisturbed run, which for greedy requests and beams is that of `generate`.

A sample here, 20 kills of each kind in `make test-long`; sizes are printed.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import tight_stacks
from tests.e2e.test_worker_groups import Troubles, befall
from tests.support.stack import kill_requests, scheduler_kills
from tests.support.stack.commands import blocks
from tests.support.stack.kill_plan import AT_RANDOM, Killer
from tests.support.stack.supervised import Readings, Supervised, supervised

Record = Callable[[str, object], None]
Harm = Callable[[Readings], None]
SAMPLE = Counter({"copy": 1})
WHOLE = Counter({"copy": 4, "swap out": 3, "swap in": 3, "middle chunk": 3, "beams": 1, "answer": 2, AT_RANDOM: 4})


def survive(running: Supervised, path: Path, harm: Harm) -> str:
    """All requests again and again until `harm` is over; how much came. No block leaks."""
    address, cases = running.stack.grpc_address, tight_stacks.cases()
    expected = tight_stacks.expected(address, path, cases)
    num_requests, num_tokens = kill_requests.repeat(
        address, cases, expected, harm, logprob_tolerance=tight_stacks.LOGPROB_TOLERANCE
    )
    pool = blocks(running.stack.admin_address)["gpu"]
    assert pool["free"] == pool["total"]
    return f"a model with states; {num_requests} requests, {num_tokens} tokens, 0 lost or changed"


def kill_workers(running: Supervised, killer: Killer, path: Path, moments: Counter[str], seed: int) -> str:
    """Kills of the worker at these moments."""
    before = killer.counts
    size = survive(running, path, killer.kills(running, list(moments.elements()), seed))
    assert killer.counts - before + Counter({AT_RANDOM: moments[AT_RANDOM]}) == moments
    return f"kills of a worker: {moments.total()}, {size}"


def test_kills_of_workers_with_states_lose_no_token(
    killable_states: Supervised, state_killer: Killer, state_model: Path, record_property: Record
) -> None:
    """R3, R123: kill -9 within a copy of states."""
    record_property("size", kill_workers(killable_states, state_killer, state_model, SAMPLE, seed=1))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_many_kills_of_workers_with_states(
    killable_states: Supervised, state_killer: Killer, state_model: Path, record_property: Record
) -> None:
    """The same 20 times, at many moments."""
    assert WHOLE.total() == 20
    record_property("size", kill_workers(killable_states, state_killer, state_model, WHOLE, seed=2))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_kills_of_schedulers_with_states_lose_no_token(
    killable_states: Supervised, state_model: Path, record_property: Record
) -> None:
    """R25: kill -9 of the scheduler: the next one knows no states, and computes them again."""
    count = 20
    size = survive(killable_states, state_model, scheduler_kills.kills(killable_states, count, seed=count))
    record_property("size", f"kills of a scheduler: {count}, {size}")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["quire", "vllm-v1", "vllm-v1-async"])
def test_workers_with_states_are_lost_and_drained(policy: str, state_model: Path, record_property: Record) -> None:
    """R3, R123: of three workers one is killed, 20 times, or drained, 10 times: its requests are computed again elsewhere."""
    with supervised(
        model=state_model,
        workers=3,
        policy=policy,
        policy_set=("restraint=null", "preemption_mode=swap") if policy == "quire" else (),
        max_num_batched_tokens=64,
        scheduler_args=("--max-num-seqs", "16"),
        worker_args=tight_stacks.tight(state_model),
    ) as running:
        size = survive(running, state_model, befall(running, Troubles(20, 10, policy), seed=3))
    record_property("size", f"3 workers, {policy}: 20 kills, 10 drains, {size}")
