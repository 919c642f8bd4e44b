"""Stages of real checkpoints: tokens of `generate`, with chunks, swaps, prefixes; stages that differ or die end their group."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from paged_kernels.reference import ReferenceBackend
from protos.worker.v1 import worker_pb2
from quire.built_in_model import default_model
from svc_common import wire_arrays
from svc_common.errors import ConfigError, InvalidArgument
from tests.support.checkpoints import make_checkpoint
from tests.support.quantized_files import gptq, stored_so
from tests.support.worker import generated
from tests.support.worker.driver import Driver, Step, generate, make_engine
from tests.support.worker.rank_group import RunningGroup, ended, other_block_ids, running, settings_of, stopped
from tests.support.worker.rank_runs import NEW_TOKENS, check, check_chunks, check_swaps_and_prefixes, prompts
from worker_svc.engine import DeviceLost
from worker_svc.model.attention import register
from worker_svc.model.checkpoint import load_model, model_class, open_checkpoint
from worker_svc.model.row_model import RowModel
from worker_svc.model.stages.division import part_of, staged

CASES = [("llama", 1, 2, 2)]
LONG_CASES = [
    ("qwen3", 1, 2, 4),
    ("llama", 2, 2, 2),
    ("qwen3", 2, 2, 4),
    ("llama", 1, 3, 7),
    *(
        (family, 1, 2, 4)
        for family in ("mistral", "qwen2", "gemma2", "gemma3_text", "phi3", "gpt_neox", "mixtral", "llama4_text")
    ),
]


@pytest.fixture(
    scope="module", params=[*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in LONG_CASES)], ids=str
)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, RunningGroup]]:
    """Family, ranks of each stage, stages, layers: the checkpoint and the running group."""
    family, tensor, stages, layers = request.param
    path = make_checkpoint(family, tmp_path_factory.mktemp("stages") / family, num_hidden_layers=layers)
    with running(path, tensor, pipeline_parallel=stages) as group:
        yield path, group


def test_chunks_and_late_arrivals(case: tuple[Path, RunningGroup], record_property) -> None:
    """Each stage has some of the layers and of the cache; tokens and logprobs are those of `generate`."""
    path, group = case
    driver = Driver(group)
    check_chunks(driver, path)
    assert group.own._loaded is not None and not group.losses
    num_layers = group.own._loaded.model._model.config.num_hidden_layers
    assert group.own.cache.device_pool.shape[0] == -(-num_layers // group.settings.pipeline_parallel) < num_layers
    sizes = f"{group.settings.pipeline_parallel} stages of {group.settings.tensor_parallel} ranks"
    record_property("size", f"{path.name}, {sizes}: {sum(map(len, driver.tokens.values()))} tokens of generate")


def test_repeated_steps_swaps_and_cached_prefixes(case: tuple[Path, RunningGroup]) -> None:
    """Blocks that are swapped out and in, and shared blocks, hold each stage's part."""
    path, group = case
    check_swaps_and_prefixes(Driver(group), path)
    assert not group.losses


def test_a_bad_step_changes_no_stage(case: tuple[Path, RunningGroup]) -> None:
    """A step that all ranks refuse is an error of the step, behind one that is in flight; the next ones run."""
    path, group = case
    driver = Driver(group)
    driver.add("b", prompts()[1], room=NEW_TOKENS)
    driver.run()
    repeated = group.launch(worker_pb2.SchedulerOutputs(num_decode_steps=1))
    refused = group.launch(worker_pb2.SchedulerOutputs(num_decode_steps=1, removed_rows=b"\x07\0\0\0"))
    assert not repeated.is_ready and not refused.is_ready
    assert repeated.finish().num_computed_tokens == 1
    with pytest.raises(InvalidArgument):
        refused.finish()
    driver = Driver(group)
    generate(driver, "a", prompts()[2], NEW_TOKENS)
    check(driver, path, {"a": prompts()[2]})
    assert not group.losses


def test_a_new_owner_while_steps_are_in_flight(case: tuple[Path, RunningGroup]) -> None:
    """What was launched for the last owner is dropped on all ranks, though the last stage has drawn its tokens."""
    path, group = case
    for _ in range(2):
        driver = Driver(group)
        driver.add("a", prompts()[3], room=NEW_TOKENS)
        driver.add("b", prompts()[1], room=NEW_TOKENS)
        group.launch(driver._message(1))
        pending = group.launch(worker_pb2.SchedulerOutputs(num_decode_steps=1))
        assert not pending.is_ready
    driver = Driver(group)
    generate(driver, "a", prompts()[2], NEW_TOKENS)
    check(driver, path, {"a": prompts()[2]})
    assert not group.losses


def test_a_stage_computes_the_next_batch_meanwhile(case: tuple[Path, RunningGroup]) -> None:
    """While the last stage stands still in a step, the first one computes a step of other rows."""
    path, group = case
    driver = Driver(group)
    for name in "ab":
        driver.add(name, prompts()[3])
    driver.run()
    messages = []
    for name, other in ("ab", "ba"):
        driver.compute(name)
        driver.pause(other)
        messages.append(driver._message(1))
        driver.step = Step()
    last_stage = group.followers[-group.settings.tensor_parallel :]
    for process in last_stage:
        stopped(process)
    pending = [group.launch(message) for message in messages]
    assert not any(step.is_ready for step in pending)
    for process in last_stage:
        process.send_signal(signal.SIGCONT)
    reference = generated.greedy(generated.reference_model(path), prompts()[3], 2)
    for step in pending:
        assert wire_arrays.unpack(step.finish().token_ids, "token_ids").tolist() == reference.token_ids[1:]
    assert not group.losses


def quantized_checkpoint(folder: Path) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    return stored_so(make_checkpoint("qwen2", folder / "source", **sizes), folder / "stored", gptq(4, 32, sym=True))


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (quantized_checkpoint, {}),
        (lambda _folder: Path(default_model()), {"quantization": "int8"}),
        (lambda _folder: Path(default_model()), {"kv_cache_dtype": "int8"}),
        (lambda _folder: Path(default_model()), {"fuse": False}),
        (lambda _folder: Path(default_model()), {"backend": "reference"}),
    ],
    ids=["GPTQ", "rounded weights", "int8 cache", "modules", "reference"],
)
def test_other_forms_give_what_one_process_gives(
    make: Callable[[Path], Path], settings: dict[str, object], tmp_path: Path
) -> None:
    """Quantized weights and caches, and decoders without a program."""
    path, prompt = make(tmp_path), prompts()[3]
    expected = generate(Driver(make_engine(path, device="cpu", dtype="float32", **settings)), "a", prompt, NEW_TOKENS)
    with running(path, 1, pipeline_parallel=2, dtype="float32", **settings) as group:
        assert generate(Driver(group), "a", prompt, NEW_TOKENS) == expected


# --- ends of a group ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("tensor", "peer"), [(1, 1), pytest.param(2, 1, marks=pytest.mark.long), pytest.param(2, 3, marks=pytest.mark.long)]
)
@pytest.mark.long
def test_a_stage_fed_another_map_is_detected(
    llama: Path, monkeypatch: pytest.MonkeyPatch, tensor: int, peer: int
) -> None:
    """One block id of a row differs at one rank: no token of the step is returned, and the group ends."""
    with running(llama, tensor, pipeline_parallel=2) as group:
        driver = Driver(group)
        driver.add("a", prompts()[4])
        driver.run()
        other_block_ids(monkeypatch, f"rank {peer}")
        driver.add("b", prompts()[4])
        with pytest.raises(DeviceLost, match=f"rank {peer} differs from rank 0 after a step") as caught:
            driver.run()
        assert caught.value.reason == "RANKS_DIFFER"


def test_a_stage_with_other_rows_is_detected(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hidden states that arrive are of fewer tokens than the stage is to compute."""
    with running(llama, 1, pipeline_parallel=2) as group:
        driver = Driver(group)
        driver.add("a", prompts()[4])
        driver.run()
        decoder = group.own._loaded.model
        monkeypatch.setattr(
            decoder._ends._links, "send", lambda states, send=decoder._ends._links.send: send(states[:, 1:])
        )
        driver.add("b", prompts()[4])
        with pytest.raises(DeviceLost, match="the group of 2 ranks has ended"):
            driver.run()
        assert "bytes of hidden states for pass" in ended(group.followers[0])


@pytest.mark.parametrize("is_in_a_step", [pytest.param(False, marks=pytest.mark.long), True], ids=["idle", "in a step"])
def test_a_dead_stage_is_seen_at_once(llama: Path, is_in_a_step: bool) -> None:
    """Rank 0 is told without a step, and while it waits for tokens."""
    with running(llama, 1, pipeline_parallel=2, rank_timeout_s=60) as group:
        driver = Driver(group)
        driver.add("a", prompts()[4], room=NEW_TOKENS)
        driver.run()
        [process] = group.followers
        begin = time.monotonic()
        if is_in_a_step:
            stopped(process)
            pending = group.launch(worker_pb2.SchedulerOutputs(num_decode_steps=1))
            process.kill()
            with pytest.raises(DeviceLost, match="rank 1 is lost"):
                pending.wait()
        process.kill()
        while not group.losses:
            assert time.monotonic() < begin + 30
            time.sleep(0.005)
        assert "rank 1 is lost" in group.losses[0].message
        assert time.monotonic() < begin + 30


# --- what is refused ---------------------------------------------------------------------------------------------------


def test_layers_are_divided_evenly() -> None:
    """All layers, in order; the first stages have one more."""
    assert [part_of(7, number, 3).layers for number in range(3)] == [range(3), range(3, 5), range(5, 7)]
    assert [part_of(4, number, 4).layers for number in range(4)] == [range(i, i + 1) for i in range(4)]


def test_more_stages_than_layers_are_refused(llama: Path) -> None:
    """Both values are named, before weights are read."""
    found = open_checkpoint(llama)
    with pytest.raises(ConfigError, match="the model has 2 layers, and 3 stages need at least one each; use at most 2"):
        staged(found, model_class(found), 0, 3)


@pytest.mark.parametrize("family", ["gemma4_text", "gemma3n_text"])
def test_layers_that_read_keys_of_others_are_refused(family: str, tmp_path: Path) -> None:
    """They may be of another stage."""
    found = open_checkpoint(make_checkpoint(family, tmp_path / family))
    with pytest.raises(ConfigError, match="--pipeline-parallel: layers read keys and values of layers before them"):
        staged(found, model_class(found), 0, 2)


def test_layers_that_read_tokens_are_refused(llama: Path) -> None:
    """A decoder whose layers behind the first stage get more than hidden states and positions."""
    found = open_checkpoint(llama)
    found, cls, part = staged(found, model_class(found), 1, 2)
    model, _ = load_model(found, cls, torch.float32, register(), lambda _done: None)
    stage = RowModel(model, ReferenceBackend())
    stage.divide(part)
    stage.probe(64)
    stage.check_stage(64)
    layer = model.model.layers[1]
    inner, embedded = layer.forward, []
    model.model.embed_tokens.register_forward_hook(lambda _module, given, _out: embedded.append(given[0]))
    layer.forward = lambda states, **given: inner(states, **given) + embedded[-1].float()[..., None]
    with pytest.raises(ConfigError, match="layers of LlamaForCausalLM read the tokens themselves"):
        stage.check_stage(64)


def test_settings_that_stages_do_not_support(llama: Path, tmp_path: Path) -> None:
    """With both values."""
    with pytest.raises(
        ConfigError, match="4 is not below --tensor-parallel 2 x --pipeline-parallel 2; ranks are 0 to 3"
    ):
        settings_of(llama, 2, pipeline_parallel=2, rank=4, leader="a:1")
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"--pipeline-parallel: 2 excludes GGUF files, and --model is .*model\.gguf"):
        settings_of(gguf, 1, pipeline_parallel=2)


def test_adapters_are_refused(case: tuple[Path, RunningGroup], tmp_path: Path) -> None:
    """Naming the stages and the folder; the group goes on."""
    _, group = case
    with pytest.raises(
        InvalidArgument, match=f"--pipeline-parallel {group.settings.pipeline_parallel} excludes adapters"
    ):
        group.load_adapter(1, str(tmp_path))
    generate(Driver(group), "a", prompts()[0], 2)
    assert not group.losses
