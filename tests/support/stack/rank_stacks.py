"""A worker of several ranks behind gateway and scheduler: its requests are compared with `generate`, and its ranks are killed."""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from quire import SamplingParams
from quire.client.sync_client import Client
from tests.support.stack import kill_requests
from tests.support.stack.commands import blocks
from tests.support.stack.kill_plan import AT_RANDOM, Killer
from tests.support.stack.oracle import Job, expected
from tests.support.stack.supervised import Readings, Supervised, supervised

MOMENTS = ("middle chunk", "grammar", AT_RANDOM)
SAMPLE = (("middle chunk", 1), ("grammar", 0))
EACH_RANK = tuple((moment, rank) for moment in MOMENTS for rank in (0, 1))


@contextmanager
def two_ranks(killer: Killer, **options: object) -> Iterator[Supervised]:
    """Two ranks in few blocks, with chunks, swaps and prefix hits; `killer` kills them from within."""
    with supervised(
        environ=killer.environ,
        tensor_parallel=2,
        policy_set=("restraint=null", "preemption_mode=swap"),
        max_num_batched_tokens=64,
        worker_args=(
            *("--dtype", "float32", "--max-model-len", "384", "--swap-space", "16MiB"),
            *("--num-gpu-blocks-override", "32", "--rank-timeout-s", "2"),
        ),
        scheduler_args=("--max-num-seqs", "16", "--no-worker-timeout-s", "300", "--max-worker-losses", "50"),
        **options,
    ) as running:
        yield running


def greedy_tokens(address: str, jobs: Sequence[Job]) -> tuple[list[list[int]], int]:
    """The jobs' tokens, all asked for at once, and how often a request was preempted."""

    def ask(job: Job) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=job.max_tokens, ignore_eos=True)
        output = client.generate(list(job.prompt), params, timeout_s=240)
        preempted.append(output.num_preemptions)
        return list(output.outputs[0].token_ids)

    preempted: list[int] = []
    with Client(address) as client, ThreadPoolExecutor(len(jobs)) as pool:
        found = list(pool.map(ask, jobs))
    return found, sum(preempted)


def equal_to_generate(address: str, path: Path, jobs: Sequence[Job], *, is_tight: bool = True) -> str:
    """Asks for all jobs at once, twice, so that prefixes are cached the second time; what was compared.

    `is_tight`: some sequences must be preempted.
    """
    wanted = [expected(path, job).token_ids for job in jobs]
    num_preempted = 0
    for _ in range(2):
        found, preempted = greedy_tokens(address, jobs)
        assert found == wanted
        num_preempted += preempted
    assert num_preempted > 0 or not is_tight, "the pool was to force preemption"
    num_tokens = 2 * sum(map(len, wanted))
    return f"equal to generate: {2 * len(jobs)} requests, {num_tokens} tokens, {num_preempted} preemptions"


def kill_each(
    running: Supervised, killer: Killer, kills: Sequence[tuple[str, int]], *, logprob_tolerance: float = 0.0
) -> str:
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

    num_requests, num_tokens = kill_requests.repeat(
        address, cases, expected_outputs, kill, logprob_tolerance=logprob_tolerance
    )
    pool, deaths = blocks(running.stack.admin_address)["gpu"], running.deaths[before:]
    # The other ranks of each group too; one that is back before its group has ended starts over once more.
    assert len(deaths) >= 2 * len(kills), deaths
    assert pool["free"] == pool["total"]
    told = ", ".join(f"rank {rank} at {moment}" for moment, rank in kills)
    return f"kills of a rank: {told}; {num_requests} requests, {num_tokens} tokens, 0 lost or changed"
