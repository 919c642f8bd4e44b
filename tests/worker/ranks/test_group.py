"""Two ranks of real checkpoints: tokens of `generate`, with chunks, swaps, forks, adapters; ranks that differ end their group."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paged_kernels.ranks import SharedSums, TorchSums
from protos.worker.v1 import worker_pb2
from svc_common.errors import ConfigError, InvalidArgument
from tests.support.checkpoints import make_checkpoint
from tests.support.worker.adapter_folders import make_adapter
from tests.support.worker.driver import Driver, generate, make_engine
from tests.support.worker.rank_group import (
    RunningGroup,
    ended,
    follower,
    joining,
    other_block_ids,
    running,
    settings_of,
)
from tests.support.worker.rank_runs import NEW_TOKENS, check, check_chunks, check_swaps_and_prefixes, prompts
from worker_svc.engine import DeviceLost

FAMILIES = ("llama",)
LONG_FAMILIES = ("qwen3", "mixtral", "mistral", "qwen2", "gemma2", "gemma3_text", "qwen3_moe", "qwen2_moe")
EXPERTS = ("mixtral", "qwen3_moe", "qwen2_moe")
NO_PLAIN_STEPS = (*EXPERTS, "gemma2")  # its logits are capped behind the head


@pytest.fixture(
    scope="module",
    params=[*FAMILIES, *(pytest.param(family, marks=pytest.mark.long) for family in LONG_FAMILIES)],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("ranks") / request.param)


@pytest.fixture(scope="module")
def group(checkpoint: Path) -> Iterator[RunningGroup]:
    with running(checkpoint) as found:
        yield found


def test_chunks_and_late_arrivals(group: RunningGroup, checkpoint: Path) -> None:
    """Each rank has half of the heads and of the weights; tokens and logprobs are those of `generate`."""
    check_chunks(Driver(group), checkpoint)
    assert group.own._loaded is not None and group.own._loaded.shape.num_kv_heads == 1
    assert isinstance(group._ranks._sums, SharedSums)
    assert group.own._loaded.model.is_fused is (checkpoint.name not in EXPERTS)
    assert not group.losses


def test_repeated_steps_swaps_and_cached_prefixes(group: RunningGroup, checkpoint: Path) -> None:
    """Empty steps repeat rows on all ranks; blocks that are swapped out and in, and shared blocks, hold each rank's part."""
    driver = Driver(group)
    check_swaps_and_prefixes(driver, checkpoint)
    assert (driver.num_plain_steps > 0) is (checkpoint.name not in NO_PLAIN_STEPS)
    assert not group.losses


def test_drawn_tokens_are_those_of_one_rank(group: RunningGroup, checkpoint: Path) -> None:
    """All ranks draw; the draw depends on seed, sequence, position and logits alone."""
    options = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
    drawn = generate(Driver(group), "a", prompts()[3], NEW_TOKENS, **options)
    alone = generate(Driver(make_engine(checkpoint, device="cpu")), "a", prompts()[3], NEW_TOKENS, **options)
    assert drawn == alone and len(set(drawn)) > 8


def test_adapters_are_divided_too(group: RunningGroup, checkpoint: Path, tmp_path: Path) -> None:
    """A row with an adapter of all linear modules gives what one rank gives; a refused folder leaves the group whole."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if checkpoint.name in EXPERTS else "all-linear"
    folder = make_adapter(checkpoint, tmp_path / "adapter", 3, r=8, target_modules=targets)
    single = make_engine(checkpoint, device="cpu")
    for engine in (group, single):
        engine.reset()
        engine.load_adapter(1, str(folder))
    rare = {"adapter_id": 1}
    found = generate(Driver(group), "a", prompts()[2], NEW_TOKENS, rare=rare)
    assert found == generate(Driver(single), "a", prompts()[2], NEW_TOKENS, rare=rare)
    assert found != generate(Driver(group), "b", prompts()[2], NEW_TOKENS)
    with pytest.raises(InvalidArgument, match="is not a folder"):
        group.load_adapter(2, str(tmp_path / "nothing"))
    group.unload_adapter(1)
    assert not group.losses


def test_a_bad_step_changes_no_rank(group: RunningGroup, checkpoint: Path) -> None:
    """A step that all ranks refuse is an error of the step; the next ones run."""
    driver = Driver(group)
    with pytest.raises(InvalidArgument):
        group.execute(worker_pb2.SchedulerOutputs(num_decode_steps=1, removed_rows=b"\x07\0\0\0"))
    generate(driver, "a", prompts()[2], NEW_TOKENS)
    check(driver, checkpoint, {"a": prompts()[2]})
    assert not group.losses


# --- ends of a group ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("family", ["llama", pytest.param("mixtral", marks=pytest.mark.long)])
def test_a_follower_fed_another_map_is_detected(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block id of a row differs: no token of the step is returned, and the group ends."""
    with running(make_checkpoint(family, tmp_path / family)) as group:
        driver = Driver(group)
        driver.add("a", prompts()[4])
        driver.run()
        other_block_ids(monkeypatch, "rank 1")
        driver.add("b", prompts()[4])
        with pytest.raises(DeviceLost, match="rank 1 differs from rank 0 after a step") as caught:
            driver.run()
        assert caught.value.reason == "RANKS_DIFFER"
        with pytest.raises(DeviceLost, match="has ended"):
            driver.run()


def test_a_dead_rank_is_seen_at_once(llama: Path) -> None:
    """Without a step: the process of rank 0 is told; and a step that waits in a sum ends."""
    with running(llama, rank_timeout_s=60) as group:
        driver = Driver(group)
        driver.add("a", prompts()[4])
        driver.run()
        [process] = group.followers
        begin = time.monotonic()
        process.kill()
        while not group.losses:
            assert time.monotonic() < begin + 30
            time.sleep(0.005)
        assert "rank 1 is lost: its process has ended" in group.losses[0].message
        with pytest.raises(DeviceLost, match="rank 1 is lost"):
            driver.compute("a")
            driver.run()
        assert time.monotonic() < begin + 30


def test_a_dead_leader_ends_its_followers(llama: Path) -> None:
    """A follower whose leader closes without a goodbye ends with an error."""
    with running(llama) as group:
        for channel in group._channels:
            channel.close()
        said = ended(group.followers[0])
        assert group.followers[0].returncode == 1 and "rank 0 is lost" in said


def test_a_stopped_group_ends_its_followers_in_order(llama: Path) -> None:
    """Rank 0 says goodbye."""
    with running(llama) as group:
        process = group.followers[0]
    assert process.returncode == 0


def test_other_settings_are_refused_with_both_values(llama: Path) -> None:
    """A follower that was started otherwise, and one with another checkpoint."""
    settings = settings_of(llama, dtype="float32")
    with joining(settings) as group:
        group.followers[0].kill()
        group.followers.append(follower(settings, group.meeting.port, 1, dtype="bfloat16"))
        with pytest.raises(ConfigError, match="--dtype is float32 at rank 0 and bfloat16 at rank 1"):
            group.load(lambda _stage, _fraction: None)
        assert "--dtype is float32 at rank 0 and bfloat16 at rank 1" in ended(group.followers[1])
        assert group.followers[1].returncode == 2


@pytest.mark.long
def test_another_checkpoint_is_refused(llama: Path, tmp_path: Path) -> None:
    """Its digest differs."""
    settings = settings_of(llama)
    other = make_checkpoint("llama", tmp_path / "other", rms_norm_eps=1e-5)
    with joining(settings) as group:
        group.followers[0].kill()
        group.followers.append(follower(settings, group.meeting.port, 1, model=other))
        with pytest.raises(ConfigError, match=r"the checkpoint's digest is \w+ at rank 1 and \w+ at rank 0"):
            group.load(lambda _stage, _fraction: None)


@pytest.mark.long
def test_without_shared_memory_torch_sums(llama: Path) -> None:
    """The backend without the compiled library: by Gloo, module by module, the same tokens."""
    with running(llama, backend="reference") as group:
        assert isinstance(group._ranks._sums, TorchSums)
        driver = Driver(group)
        generate(driver, "a", prompts()[3], NEW_TOKENS)
        check(driver, llama, {"a": prompts()[3]})


@pytest.mark.long
def test_key_value_heads_are_replicated_over_more_ranks(llama: Path) -> None:
    """Four ranks of a model with two key-value heads and four query heads; integers as weights."""
    with running(llama, 4) as group:
        assert group.own._loaded is not None and group.own._loaded.shape.num_kv_heads == 1
        driver = Driver(group)
        generate(driver, "a", prompts()[3], NEW_TOKENS)
        check(driver, llama, {"a": prompts()[3]})
