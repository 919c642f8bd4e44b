"""Several worker processes under one scheduler and any preset: one queue, and the tokens of an undisturbed run whatever happens.

A sample here, the whole in `make test-long`; sizes are printed.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from quire.client.sync_client import Client
from quire.operators.admin import AdminClient
from svc_common.errors import FailedPrecondition, NotFound
from tests.e2e import preset_signs as signs
from tests.e2e import tight_stacks
from tests.e2e.preset_cases import Case, compare
from tests.e2e.served_life import Life
from tests.support.scraping import scrape
from tests.support.stack import kill_requests
from tests.support.stack.commands import blocks, quire_here, steps
from tests.support.stack.supervised import Readings, Supervised, supervised
from tests.worker.families.tiny_checkpoints import family_checkpoint

Record = Callable[[str, object], None]
NUM_WORKERS = 3
COUNT, SAMPLE_COUNT = 200, 40
TIGHT = ("--dtype", "float32", "--max-model-len", "256", "--swap-space", "8MiB", "--num-gpu-blocks-override", "24")


def runs_on_all(life: Life) -> None:
    """Each worker runs steps, and no sequence is in two of their plans at the same time."""
    assert {step["lane"] for step in life.steps} == set(range(NUM_WORKERS))


def _several(policy: str, sets: tuple[str, ...] = (), num_blocks: int = 22, **case: Any) -> Case:
    return Case(policy, (runs_on_all, signs.preempts), sets, {"workers": NUM_WORKERS}, num_blocks, **case)


def _never_preempts(policy: str, sets: tuple[str, ...] = ()) -> Case:
    return replace(_several(policy, sets), signs=(runs_on_all,))


SAMPLE = _several("quire", ("restraint=null", "preemption_mode=swap", "tenant_fairness=false"))
WHOLE = [
    _several("quire", ("restraint=null",), args=("--overlap",)),
    _several("quire", ("restraint=null", "preemption_mode=swap")),
    _several("quire", ("restraint=null", "placement=least_work")),
    _several("vllm-v0", num_blocks=32),
    _several("vllm-v0-chunked", ("max_num_batched_tokens=64",), num_blocks=32),
    _several("vllm-2023", ("preemption_mode=swap", "prefix_caching=false")),
    _several("vllm-v1", ("placement=round_robin",)),
    _several("vllm-v1-async", args=("--overlap",)),
    _never_preempts("static"),
    _several("chitu"),
]
"""Every preset that drives worker groups, in few blocks. Slots of `chitu-skew` are numbered through all workers (below)."""


@pytest.mark.long
def test_mixed_requests_on_several_workers(tmp_path: Path, record_property: Record) -> None:
    """R21, R25: one preset, three processes; its recording is replayed to the last decision (R201)."""
    record_property("size", compare(SAMPLE, SAMPLE_COUNT, tmp_path))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_every_preset_on_several_workers(case: Case, tmp_path: Path, record_property: Record) -> None:
    """R2, R21, R25, R27: 200 mixed requests for each preset, on three processes."""
    record_property("size", compare(case, COUNT, tmp_path))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_slots_on_several_workers(tmp_path: Path, record_property: Record) -> None:
    """R183: skew slots of each worker are lanes of their own."""
    case = Case("chitu-skew", (), ("infer.pp_size=2", "infer.max_reqs=16"), {"workers": NUM_WORKERS}, 40)
    record_property("size", compare(case, COUNT, tmp_path))


@dataclass(frozen=True)
class Troubles:
    """How often a worker is killed, and drained with its requests moved."""

    num_kills: int
    num_drains: int
    policy: str = "quire"
    sets: tuple[str, ...] = ("restraint=null", "preemption_mode=swap")


def survive(running: Supervised, troubles: Troubles, seed: int) -> str:
    """Kills and drains at random moments while requests of all kinds go on; what was done."""
    address, cases = running.stack.grpc_address, kill_requests.cases()
    expected = kill_requests.undisturbed(address, cases)
    num_requests, num_tokens = kill_requests.repeat(address, cases, expected, befall(running, troubles, seed))
    pool = blocks(running.stack.admin_address)["gpu"]
    assert pool["free"] == pool["total"]
    return (
        f"{NUM_WORKERS} workers, models/tiny, {troubles.policy}: {troubles.num_kills} kills of one, {troubles.num_drains} drains; "
        f"{num_requests} requests, {num_tokens} tokens, 0 lost or changed"
    )


def befall(running: Supervised, troubles: Troubles, seed: int) -> Callable[[Readings], None]:
    """Kills and drains one worker after the other, while others run steps."""
    names, rng = running.stack.options.worker_names, random.Random(seed)
    events = ["kill"] * troubles.num_kills + ["drain"] * troubles.num_drains
    rng.shuffle(events)

    def harm(readings: Readings) -> None:
        with AdminClient(running.stack.admin_address) as admin:
            for event in events:
                readings.wait_for(readings.num_tokens + rng.randint(20, 200))
                wait_ready(admin, 2)
                number = rng.randrange(len(names))
                if event == "kill":
                    running.kill(names[number])
                else:
                    drain_and_undo(admin, number)

    return harm


def wait_ready(admin: AdminClient, least: int) -> None:
    """So many workers run steps, so that requests of a lost or drained one continue at once."""
    deadline = time.monotonic() + 60
    while sum(worker.ready and not worker.draining for worker in admin.workers()) < least:
        assert time.monotonic() < deadline, "the workers do not come back"
        time.sleep(0.02)


def drain_and_undo(admin: AdminClient, number: int) -> None:
    """Requests of one worker move to the others, and it is empty soon; then it serves again."""
    address = admin.workers()[number].address
    admin.drain(worker=address, move=True)
    deadline = time.monotonic() + 30
    while admin.workers()[number].num_running:
        assert time.monotonic() < deadline, "it is not empty"
        time.sleep(0.02)
    admin.drain(worker=address, undo=True)


def befallen(troubles: Troubles, seed: int) -> str:
    """On a stack of its own, with few blocks."""
    with supervised(
        workers=NUM_WORKERS,
        policy=troubles.policy,
        policy_set=troubles.sets,
        scheduler_args=("--max-num-seqs", "16"),
        worker_args=TIGHT,
    ) as running:
        return survive(running, troubles, seed)


def test_one_of_several_workers_is_lost_or_drained(record_property: Record) -> None:
    """R3, R123: its requests go on elsewhere at once: every token exactly once, and the same."""
    record_property("size", befallen(Troubles(2, 2), seed=1))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "troubles",
    [
        Troubles(20, 10),
        Troubles(20, 10, "vllm-v0", ("preemption_mode=swap",)),
        Troubles(20, 10, "vllm-v0-chunked", ()),
        Troubles(20, 10, "vllm-2023", ("preemption_mode=swap", "prefix_caching=false")),
        Troubles(20, 10, "vllm-v1", ()),
        Troubles(20, 10, "vllm-v1-async", ()),
        Troubles(20, 10, "static", ()),
        Troubles(20, 10, "chitu", ()),
        Troubles(20, 10, "chitu-skew", ("infer.pp_size=2", "infer.max_reqs=16")),
    ],
    ids=lambda troubles: troubles.policy,
)
def test_many_workers_are_lost_and_drained(troubles: Troubles, record_property: Record) -> None:
    """The same with 20 kills and 10 drains, under every preset."""
    record_property("size", befallen(troubles, seed=2))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["gpt_oss", "gemma3n_text", "deepseek_v3", "qwen3_next", "lfm2", "nemotron_h"])
def test_sequences_of_all_models_move(name: str, tmp_path: Path, record_property: Record) -> None:
    """R200: workers are drained under load; with windows, shared KV and states every token is that of `generate`."""
    path, rng = family_checkpoint(name, tmp_path / name), random.Random(3)
    with supervised(
        model=path,
        workers=2,
        policy_set=("restraint=null",),
        max_num_batched_tokens=64,
        worker_args=tight_stacks.tight(path),
        scheduler_args=("--max-num-seqs", "16"),
    ) as running:
        address, cases = running.stack.grpc_address, tight_stacks.cases()
        expected = tight_stacks.expected(address, path, cases)

        def harm(readings: Readings) -> None:
            with AdminClient(running.stack.admin_address) as admin:
                for number in (0, 1) * 3:
                    readings.wait_for(readings.num_tokens + rng.randint(20, 200))
                    drain_and_undo(admin, number)

        tolerance = tight_stacks.tolerance(name)
        num_requests, num_tokens = kill_requests.repeat(address, cases, expected, harm, logprob_tolerance=tolerance)
        num_moves = asyncio.run(scrape(running.stack.metrics_addresses["scheduler"])).value("quire_moved_groups_total")
        assert num_moves > 0
    record_property(
        "size", f"{name}: {num_moves:.0f} moves, {num_requests} requests, {num_tokens} tokens, 0 lost or changed"
    )


@pytest.fixture(scope="module")
def simulated() -> Any:
    """Two simulated workers."""
    with supervised(simulated=True, workers=2) as running:
        yield running


@pytest.mark.long
def test_the_commands_know_the_workers(simulated: Supervised) -> None:
    """`quire workers`, `quire drain --worker`, steps, blocks and reasons have the worker's number."""
    admin = simulated.stack.admin_address
    first, second = simulated.stack.worker_addresses
    listed = json.loads(quire_here("workers", "--json", "--admin", admin, check=True).stdout)
    assert [(worker["address"], worker["draining"]) for worker in listed] == [(first, False), (second, False)]
    done = quire_here("drain", "--worker", first, "--admin", admin, check=True)
    assert done.stdout == f"the worker at {first} takes no more requests; 0 run there\n"
    assert "drained" in quire_here("workers", "--admin", admin, check=True).stdout
    before = len(steps(admin))
    with Client(simulated.stack.grpc_address) as client:
        client.generate("import ")
    assert {step["lane"] for step in steps(admin)[before:]} == {1}
    with AdminClient(admin) as administration:
        with pytest.raises(FailedPrecondition, match=f"no other worker could take the requests of {second}"):
            administration.drain(worker=second)
        with pytest.raises(NotFound, match=f"there is no worker at nowhere:1; there are: {first}, {second}"):
            administration.drain(worker="nowhere:1")
        administration.drain(worker=first, undo=True)
    assert quire_here("drain", "--move", "--admin", admin).returncode == 2
