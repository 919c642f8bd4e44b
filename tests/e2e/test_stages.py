"""A worker of several stages behind gateway and scheduler: tokens of `generate`; any rank dies or hangs, and all streams go on."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire import SamplingParams
from quire.built_in_model import default_model
from quire.client.sync_client import Client
from quire.local_stack.certificate_folder import CertificateFolder
from quire.local_stack.certificates import make_certificates
from quire.local_stack.stack import LocalStack
from svc_common.errors import ConfigError
from tests.support.stack.kill_plan import Killer
from tests.support.stack.oracle import expected, mixed_jobs
from tests.support.stack.rank_stacks import MOMENTS, SAMPLE, equal_to_generate, kill_each
from tests.support.stack.supervised import Supervised, supervised

Record = Callable[[str, object], None]
JOBS = mixed_jobs(12, 4000)
WORKER = (
    *("--dtype", "float32", "--max-model-len", "256", "--swap-space", "16MiB"),
    *("--num-gpu-blocks-override", "32", "--rank-timeout-s", "3"),
)


@pytest.fixture(scope="module")
def killer(tmp_path_factory: pytest.TempPathFactory) -> Killer:
    """Kills ranks from within."""
    return Killer(tmp_path_factory.mktemp("kills"))


@pytest.fixture(
    scope="module", params=[(1, 2), pytest.param((2, 2), marks=pytest.mark.long)], ids=["two stages", "two of two"]
)
def stages(killer: Killer, request: pytest.FixtureRequest) -> Iterator[Supervised]:
    """Stages in few blocks, with chunks, swaps and prefix hits, and plans sent ahead."""
    tensor, count = request.param
    with supervised(
        environ=killer.environ,
        tensor_parallel=tensor,
        pipeline_parallel=count,
        policy_set=("restraint=null", "preemption_mode=swap"),
        max_num_batched_tokens=64,
        worker_args=WORKER,
        scheduler_args=(
            "--max-num-seqs",
            "16",
            "--overlap",
            "--no-worker-timeout-s",
            "300",
            "--max-worker-losses",
            "50",
        ),
    ) as running:
        yield running


def sizes(running: Supervised) -> str:
    options = running.stack.options
    return f"{options.pipeline_parallel} stages of {options.tensor_parallel} ranks"


def test_tokens_are_those_of_generate(stages: Supervised, record_property: Record) -> None:
    """12 requests at once in few blocks: chunks, preemption, swaps, prefix hits."""
    record_property("size", f"{sizes(stages)}, {equal_to_generate(stages.stack.grpc_address, default_model(), JOBS)}")


@pytest.mark.long
def test_a_killed_rank_loses_no_token(stages: Supervised, killer: Killer, record_property: Record) -> None:
    """R3: a rank of either stage is killed within a step; its group is restarted as a whole."""
    record_property("size", f"{sizes(stages)}: {kill_each(stages, killer, SAMPLE)}")


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_each_rank_at_each_moment(stages: Supervised, killer: Killer, record_property: Record) -> None:
    """Each rank at three kinds of moments."""
    options = stages.stack.options
    num_ranks = options.tensor_parallel * options.pipeline_parallel
    kills = tuple((moment, rank) for moment in MOMENTS for rank in range(num_ranks))
    record_property("size", f"{sizes(stages)}: {kill_each(stages, killer, kills)}")


@pytest.mark.long
def test_a_rank_that_hangs_ends_its_group(stages: Supervised) -> None:
    """A stopped last rank is noticed within a step; the group is restarted, and the stream goes on."""
    before, options = len(stages.deaths), stages.stack.options
    num_ranks = options.tensor_parallel * options.pipeline_parallel
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    with Client(stages.stack.grpc_address) as client:
        wanted = client.generate("class Node:", params, timeout_s=60).outputs[0].token_ids
        stream = client.generate_stream("class Node:", params, timeout_s=60)
        parts = iter(stream)
        next(parts)
        stages.kill(f"worker-rank-{num_ranks - 1}", signal.SIGSTOP)
        for _ in parts:
            pass
        assert stream.result.outputs[0].token_ids == wanted
    assert any(f"the group of {num_ranks} ranks has ended" in death for death in stages.deaths[before:]), stages.deaths


@pytest.mark.long
def test_batches_of_different_rows_are_in_flight(record_property: Record) -> None:
    """Chitu's scheduler groups: while one stage computes a batch, the other computes another one; the same tokens."""
    policy = ("infer.pp_size=2", "infer.max_reqs=8")
    with LocalStack(
        pipeline_parallel=2,
        policy="chitu",
        policy_set=policy,
        worker_args=(*WORKER[:4], "--num-gpu-blocks-override", "40"),
    ) as stack:
        asked = equal_to_generate(stack.grpc_address, default_model(), JOBS, is_tight=False)
    record_property("size", f"two stages under chitu with two groups, {asked}")


@pytest.mark.long
def test_stages_under_tls(tmp_path: Path) -> None:
    """Hidden states and tokens go over mutual TLS, as steps do."""
    folder, job = CertificateFolder(tmp_path), mixed_jobs(4, 4000)[2]
    make_certificates(folder)
    params = SamplingParams(temperature=0, max_tokens=job.max_tokens, ignore_eos=True)
    with (
        LocalStack(pipeline_parallel=2, tls=folder.path, worker_args=WORKER[:4]) as stack,
        Client(stack.grpc_address, credentials=stack.credentials) as client,
    ):
        found = client.generate(list(job.prompt), params, timeout_s=60).outputs[0].token_ids
    assert list(found) == expected(default_model(), job).token_ids


@pytest.mark.long
def test_more_stages_than_layers_are_refused_at_start() -> None:
    """Both values are named."""
    with pytest.raises(ConfigError, match="the model has 4 layers, and 5 stages need at least one each; use at most 4"):
        LocalStack(pipeline_parallel=5).start()


def test_adapters_are_refused_at_start() -> None:
    """Before anything starts."""
    with pytest.raises(
        ConfigError, match="--pipeline-parallel 2 excludes adapters, and --adapter is sql=/adapters/sql"
    ):
        LocalStack(pipeline_parallel=2, adapters={"sql": "/adapters/sql"}).start()
