"""A worker of two ranks behind gateway and scheduler: tokens of `generate`; any rank dies or hangs, and all streams go on."""

import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire import SamplingParams
from quire.built_in_model import default_model
from quire.client.sync_client import Client
from quire.local_stack.stack import LocalStack
from svc_common.errors import ConfigError
from tests.support.stack import kill_requests
from tests.support.stack.commands import blocks
from tests.support.stack.kill_plan import AT_RANDOM, Killer
from tests.support.stack.oracle import Job, expected, mixed_jobs
from tests.support.stack.supervised import Readings, Supervised, supervised

Record = Callable[[str, object], None]
MOMENTS = ("middle chunk", "grammar", AT_RANDOM)
SAMPLE = (("middle chunk", 1), ("grammar", 0))


@pytest.fixture(scope="module")
def rank_killer(tmp_path_factory: pytest.TempPathFactory) -> Killer:
    """Kills ranks from within."""
    return Killer(tmp_path_factory.mktemp("kills"))


@pytest.fixture(scope="module")
def ranks(rank_killer: Killer) -> Iterator[Supervised]:
    """Two ranks in few blocks, with chunks, swaps and prefix hits."""
    with supervised(
        environ=rank_killer.environ,
        tensor_parallel=2,
        policy_set=("restraint=null", "preemption_mode=swap"),
        max_num_batched_tokens=64,
        worker_args=(
            *("--dtype", "float32", "--max-model-len", "256", "--swap-space", "16MiB"),
            *("--num-gpu-blocks-override", "32", "--rank-timeout-s", "2"),
        ),
        scheduler_args=("--max-num-seqs", "16"),
    ) as running:
        yield running


def test_tokens_are_those_of_generate(ranks: Supervised, record_property: Record) -> None:
    """Two ranks, 12 requests at once in few blocks: chunks, preemption, swaps, prefix hits."""
    jobs = mixed_jobs(12, 4000)
    wanted = [expected(default_model(), job) for job in jobs]

    def ask(job: Job) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=job.max_tokens, ignore_eos=True)
        output = client.generate(list(job.prompt), params, timeout_s=240)
        preempted.append(output.num_preemptions)
        return list(output.outputs[0].token_ids)

    preempted: list[int] = []
    with Client(ranks.stack.grpc_address) as client, ThreadPoolExecutor(len(jobs)) as pool:
        for _ in range(2):  # with prefixes in the cache the second time
            assert list(pool.map(ask, jobs)) == [list(want.token_ids) for want in wanted]
    assert sum(preempted) > 0, "the pool was to force preemption"
    num_tokens = 2 * sum(len(want.token_ids) for want in wanted)
    record_property("size", f"two ranks equal to generate: {2 * len(jobs)} requests, {num_tokens} tokens")


def kill_each(running: Supervised, killer: Killer, kills: tuple[tuple[str, int], ...]) -> str:
    """Kills (moment, rank) in turn while requests of all kinds go on; what was done."""
    address, cases = running.stack.grpc_address, kill_requests.cases()
    expected_outputs = kill_requests.undisturbed(address, cases)
    before = len(running.deaths)

    def kill(readings: Readings) -> None:
        draw = random.Random(1)
        for moment, rank in kills:
            readings.wait_for(readings.num_tokens + draw.randrange(20, 120))
            if moment == AT_RANDOM:
                running.kill("worker" if rank == 0 else f"worker-rank-{rank}")
            else:
                killer.end_at(moment, readings, rank)

    num_requests, num_tokens = kill_requests.repeat(address, cases, expected_outputs, kill)
    pool, deaths = blocks(running.stack.admin_address)["gpu"], running.deaths[before:]
    # The other rank of each group too; one that is back before its group has ended starts over once more.
    assert len(deaths) >= 2 * len(kills), deaths
    assert pool["free"] == pool["total"]
    told = ", ".join(f"rank {rank} at {moment}" for moment, rank in kills)
    return f"kills of a rank, two ranks: {told}; {num_requests} requests, {num_tokens} tokens, 0 lost or changed"


def test_a_killed_rank_loses_no_token(ranks: Supervised, rank_killer: Killer, record_property: Record) -> None:
    """R3: either rank is killed within a step; its group is restarted as a whole."""
    record_property("size", kill_each(ranks, rank_killer, SAMPLE))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_each_rank_at_each_moment(ranks: Supervised, rank_killer: Killer, record_property: Record) -> None:
    """Each rank at three kinds of moments, twice."""
    kills = tuple((moment, rank) for moment in MOMENTS for rank in (0, 1)) * 2
    record_property("size", kill_each(ranks, rank_killer, kills))


def test_a_rank_that_hangs_ends_its_group(ranks: Supervised) -> None:
    """A stopped rank is noticed within a step; the group is restarted, and the stream goes on."""
    before = len(ranks.deaths)
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    with Client(ranks.stack.grpc_address) as client:
        wanted = client.generate("class Node:", params, timeout_s=60).outputs[0].token_ids
        stream = client.generate_stream("class Node:", params, timeout_s=60)
        parts = iter(stream)
        next(parts)
        ranks.kill("worker-rank-1", signal.SIGSTOP)
        for _ in parts:
            pass
        assert stream.result.outputs[0].token_ids == wanted
    assert any("the group of 2 ranks has ended" in death for death in ranks.deaths[before:]), ranks.deaths


@pytest.mark.long
def test_sizes_that_do_not_divide_are_refused_at_start() -> None:
    """Both values are named."""
    with pytest.raises(ConfigError, match="3 ranks do not divide the model's num_attention_heads of 8; use 1, 2, 4, 8"):
        LocalStack(tensor_parallel=3).start()
