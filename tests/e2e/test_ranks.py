"""A worker of two ranks behind gateway and scheduler: tokens of `generate`; any rank dies or hangs, and all streams go on."""

import signal
from collections.abc import Callable, Iterator

import pytest

from quire import SamplingParams
from quire.built_in_model import default_model
from quire.client.sync_client import Client
from quire.local_stack.stack import LocalStack
from svc_common.errors import ConfigError
from tests.support.stack.kill_plan import Killer
from tests.support.stack.oracle import mixed_jobs
from tests.support.stack.rank_stacks import EACH_RANK, SAMPLE, equal_to_generate, kill_each, two_ranks
from tests.support.stack.supervised import Supervised

Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def rank_killer(tmp_path_factory: pytest.TempPathFactory) -> Killer:
    """Kills ranks from within."""
    return Killer(tmp_path_factory.mktemp("kills"))


@pytest.fixture(scope="module")
def ranks(rank_killer: Killer) -> Iterator[Supervised]:
    """Two ranks of the built-in model."""
    with two_ranks(rank_killer) as running:
        yield running


def test_tokens_are_those_of_generate(ranks: Supervised, record_property: Record) -> None:
    """Two ranks, 12 requests at once in few blocks: chunks, preemption, swaps, prefix hits."""
    record_property(
        "size", f"two ranks, {equal_to_generate(ranks.stack.grpc_address, default_model(), mixed_jobs(12, 4000))}"
    )


def test_a_killed_rank_loses_no_token(ranks: Supervised, rank_killer: Killer, record_property: Record) -> None:
    """R3: either rank is killed within a step; its group is restarted as a whole."""
    record_property("size", kill_each(ranks, rank_killer, SAMPLE))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_each_rank_at_each_moment(ranks: Supervised, rank_killer: Killer, record_property: Record) -> None:
    """Each rank at three kinds of moments."""
    record_property("size", kill_each(ranks, rank_killer, EACH_RANK))


@pytest.mark.long
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
