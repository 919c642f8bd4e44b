"""Mixtures of experts on two ranks behind gateway and scheduler, with the experts divided over the ranks.

A sample here (Mixtral, two kills), the whole in `make test-long` (Qwen3-MoE too, each rank killed at each moment); both sizes
are printed.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.local_stack.stack import LocalStack
from svc_common.errors import ConfigError
from tests.support.checkpoints import make_checkpoint
from tests.support.routed_checkpoint import TOKENS_OF_RANK, make_routed, ranks_of
from tests.support.stack.kill_plan import Killer
from tests.support.stack.oracle import Job, expected, mixed_jobs
from tests.support.stack.rank_stacks import EACH_RANK, SAMPLE, equal_to_generate, greedy_tokens, kill_each, two_ranks
from tests.support.stack.supervised import Supervised
from tests.support.worker.generated import reference_model

Record = Callable[[str, object], None]
NUM_STEPS = 24
TOLERANCE = 1e-4  # an expert's rows are those of all requests: the last bits of log probabilities depend on them


@pytest.fixture(scope="module", params=["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose router sends some tokens to one rank alone."""
    return make_routed(request.param, tmp_path_factory.mktemp("experts") / request.param)


@pytest.fixture(scope="module")
def rank_killer(tmp_path_factory: pytest.TempPathFactory) -> Killer:
    """Kills ranks from within."""
    return Killer(tmp_path_factory.mktemp("kills"))


@pytest.fixture(scope="module")
def ranks(model: Path, rank_killer: Killer) -> Iterator[Supervised]:
    """Two ranks with two of four experts each."""
    with two_ranks(rank_killer, model=model) as running:
        yield running


@pytest.mark.long
def test_tokens_are_those_of_generate(ranks: Supervised, model: Path, record_property: Record) -> None:
    """Two ranks, 12 requests at once in few blocks: chunks, preemption, swaps, prefix hits."""
    record_property("size", f"{model.name}, {equal_to_generate(ranks.stack.grpc_address, model, mixed_jobs(12, 510))}")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_idle(ranks: Supervised, model: Path, rank: int, record_property: Record) -> None:
    """All tokens of a prompt and of the 24 steps after it go to the experts of one rank."""
    draw = random.Random(rank)
    job = Job(tuple(draw.choice(TOKENS_OF_RANK[rank]) for _ in range(40)), NUM_STEPS)
    wanted = expected(model, job).token_ids
    assert ranks_of(reference_model(model), [*job.prompt, *wanted]) == {rank}
    assert greedy_tokens(ranks.stack.grpc_address, [job])[0] == [wanted]
    record_property("size", f"{model.name}, rank {1 - rank} of two idle for {NUM_STEPS} steps, tokens of generate")


@pytest.mark.long
def test_a_killed_rank_loses_no_token(
    ranks: Supervised, model: Path, rank_killer: Killer, record_property: Record
) -> None:
    """R3: either rank is killed within a step; its group is restarted as a whole."""
    record_property("size", f"{model.name}, {kill_each(ranks, rank_killer, SAMPLE, logprob_tolerance=TOLERANCE)}")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_each_rank_at_each_moment(ranks: Supervised, model: Path, rank_killer: Killer, record_property: Record) -> None:
    """Each rank at three kinds of moments."""
    record_property("size", f"{model.name}, {kill_each(ranks, rank_killer, EACH_RANK, logprob_tolerance=TOLERANCE)}")


@pytest.mark.long
def test_experts_that_do_not_divide_are_refused_at_start(tmp_path: Path) -> None:
    """Both values are named."""
    path = make_checkpoint("mixtral", tmp_path / "mixtral", num_local_experts=5)
    with pytest.raises(ConfigError, match="2 ranks do not divide the model's 5 experts; use 1, 5"):
        LocalStack(model=path, tensor_parallel=2).start()
