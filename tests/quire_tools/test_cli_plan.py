"""`quire plan`: what fits, by the worker's own arithmetic (R8, R9)."""

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.built_in_model import default_model
from quire.cli import main
from quire_tools.plan.fits import MemoryPlan, MemoryQuestion, make_plan
from quire_tools.plan.model_sizes import ModelSizes, Rounding, model_sizes
from quire_tools.plan.picture import plan_picture
from quire_tools.plan.request import Wanted, answered
from svc_common.errors import ConfigError
from tests.support.checkpoints import FAMILIES, make_checkpoint
from tests.support.mtp_checkpoints import make_mtp_checkpoint, make_qwen3_next
from tests.support.state_shapes import STATE_SHAPES, StateFigures
from tests.worker.families.tiny_checkpoints import state_checkpoint
from worker_svc.executor.model_engine import ModelEngine
from worker_svc.model.states.layout import default_checkpoint_tokens
from worker_svc.settings import WorkerSettings

GIB = 2**30


def sizes_of(path: Path, **options: object) -> ModelSizes:
    """Of a folder, with what `quire plan` has as defaults."""
    return model_sizes(path, **{"dtype": "auto", "kv_cache_dtype": "auto", "max_model_len": None, **options})  # type: ignore[arg-type]


def asked(**changes: object) -> MemoryQuestion:
    """On a CPU with 8 GiB free."""
    values = {
        "on_cuda": False, "memory_bytes": 8 * GIB, "cache_bytes": None, "swap_bytes": GIB // 4, "block_size": 16,
        "max_num_seqs": 256, "max_num_batched_tokens": 2048, "utilization": 0.9, **changes,
    }  # fmt: skip
    return MemoryQuestion(**values)  # type: ignore[arg-type]


def of_worker(path: Path, **settings: object) -> tuple[int, ...]:
    """Weights, block, blocks, swap blocks: as a worker that loaded the model says."""
    engine = ModelEngine(WorkerSettings(model=path, device="cpu", invariant=False, **settings))  # type: ignore[arg-type]
    engine.load(lambda *_: None)
    said = engine.profile(64, 8)
    return said.weight_bytes, said.block_bytes, said.num_gpu_blocks, said.num_cpu_blocks


def of_plan(plan: MemoryPlan) -> tuple[int, ...]:
    """The same of a plan."""
    return plan.sizes.weight_bytes, plan.block_bytes, plan.num_gpu_blocks, plan.num_cpu_blocks


@pytest.mark.parametrize(
    ("dtype", "cache"), [("auto", "auto"), ("float32", "bfloat16"), ("auto", "int8"), ("auto", "fp8")]
)
def test_the_plan_is_what_a_worker_reports(dtype: str, cache: str) -> None:
    """R9: weights, bytes of a block, device and host blocks are equal; only the largest step is an estimate."""
    plan = make_plan(sizes_of(default_model(), dtype=dtype, kv_cache_dtype=cache), asked())
    assert of_plan(plan) == of_worker(default_model(), dtype=dtype, kv_cache_dtype=cache)
    assert not plan.problems and plan.concurrent[2048] == plan.num_tokens // 2048


def test_a_draft_model_is_planned(tmp_path: Path) -> None:
    """Its weights and its layers in each block are counted as a worker counts them."""
    draft = make_checkpoint("qwen3", tmp_path, vocab_size=4096)
    shutil.copy(default_model() / "tokenizer.json", tmp_path)
    wanted = Wanted(folder=default_model(), name="", memory=8 * GIB, worker={"device": "cpu", "draft_model": draft})
    plan = answered(wanted)
    assert of_plan(plan) == of_worker(default_model(), draft_model=draft)
    alone = answered(replace(wanted, worker={"device": "cpu"}))
    assert plan.block_bytes > alone.block_bytes and plan.sizes.weight_bytes > alone.sizes.weight_bytes


@pytest.mark.parametrize(
    "make", [partial(make_mtp_checkpoint, "deepseek_v3"), partial(make_mtp_checkpoint, "glm4_moe"), make_qwen3_next]
)
def test_an_mtp_head_is_planned(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """Its weights, its layer and the hidden states in each block are counted as a worker counts them."""
    path = make(tmp_path / "model")
    wanted = Wanted(folder=path, name="", memory=8 * GIB, worker={"device": "cpu", "drafts": "mtp"})
    plan, alone = answered(wanted), answered(replace(wanted, worker={"device": "cpu"}))
    (weights, *planned), (without, *_) = of_plan(plan), of_plan(alone)
    (loaded, *blocks), (loaded_without, *_) = of_worker(path, drafts="mtp"), of_worker(path)
    assert planned == blocks and plan.block_bytes > alone.block_bytes
    assert weights - without == loaded - loaded_without > 0


def test_no_head_is_planned(tmp_path: Path) -> None:
    """The error is that of a worker."""
    wanted = Wanted(folder=default_model(), name="", memory=8 * GIB, worker={"device": "cpu", "drafts": "mtp"})
    with pytest.raises(ConfigError, match="has no MTP head that is known"):
        answered(wanted)


@pytest.mark.parametrize("model_type", ["qwen3_next", "lfm2_moe", "jamba"])
def test_states_are_planned(model_type: str, tmp_path: Path) -> None:
    """The plan of a model with states has the blocks of these, the size of a block and the requests that a worker reports."""
    path = state_checkpoint(model_type, tmp_path / "model")
    plan = make_plan(sizes_of(path), asked())
    engine = ModelEngine(WorkerSettings(model=path, device="cpu"))
    limits = engine.load(lambda *_: None)
    said = engine.profile(64, 8)
    assert (plan.num_state_blocks, plan.block_bytes) == (limits.num_state_blocks, said.block_bytes)
    assert plan.num_gpu_blocks == said.num_gpu_blocks and plan.num_state_blocks > 0
    assert f"{limits.num_state_blocks} of the blocks for each request" in said.readable
    console = Console(file=io.StringIO(), width=200)
    console.print(plan_picture(plan))
    assert f"the states of a request take {plan.num_state_blocks}, " in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "model_type", [name if name == "jamba" else pytest.param(name, marks=pytest.mark.long) for name in STATE_SHAPES]
)
def test_figures_of_states(model_type: str, tmp_path: Path) -> None:
    """docs/models.md: what the states of a sequence take."""
    config = AutoConfig.for_model(model_type, dtype="bfloat16")
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    config.save_pretrained(tmp_path)
    plan = make_plan(sizes_of(tmp_path, max_model_len=2048), asked(memory_bytes=1024 * GIB))
    sizes, blocks = plan.sizes, plan.num_state_blocks
    distance = default_checkpoint_tokens(blocks, len(plan.groups.windows), 16)
    mib = round(blocks * plan.block_bytes / 2**20, 1)
    found = StateFigures(len(sizes.states), sizes.num_layers, blocks, mib, distance)
    assert found == STATE_SHAPES[model_type]


@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_a_cache_with_scales_holds_more(kept: str) -> None:
    """Nearly twice as many tokens as in bfloat16: 32 bytes for each head and 4 for its scale."""
    plans = [make_plan(sizes_of(default_model(), kv_cache_dtype=cache), asked()) for cache in ("bfloat16", kept)]
    assert plans[0].sizes.head_dim == 32 and plans[0].block_bytes * (32 + 4) == plans[1].block_bytes * 64
    assert plans[1].num_gpu_blocks == pytest.approx(plans[0].num_gpu_blocks * 64 / 36, abs=1)


@pytest.mark.parametrize(("stored", "bits", "group"), [("int8", 8, 32), ("int4", 4, 128)])
def test_rounded_weights_are_planned(stored: str, bits: int, group: int) -> None:
    """With `--quantization` too the weights are those that a worker keeps; while it loads, the unquantized ones count."""
    sizes = sizes_of(default_model(), rounding=Rounding(bits, group))
    full = sizes_of(default_model())
    assert sizes.loaded_bytes == full.weight_bytes > sizes.weight_bytes
    assert of_plan(make_plan(sizes, asked())) == of_worker(
        default_model(), quantization=stored, quantization_group=group
    )
    little = make_plan(sizes, asked(memory_bytes=sizes.weight_bytes + sizes.tied_head_bytes))
    assert little.problems


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_planned_as_served(family: str, tmp_path: Path) -> None:
    """Heads, windows, experts, tied weights: for each family the same as a worker's."""
    path = make_checkpoint(family, tmp_path)
    assert of_plan(make_plan(sizes_of(path), asked())) == of_worker(path)


def test_config_alone_is_enough(tmp_path: Path) -> None:
    """Without weights and tokenizer the sizes are the same; only the files' bytes are not known."""
    (tmp_path / "config.json").write_bytes((default_model() / "config.json").read_bytes())
    whole = sizes_of(default_model())
    assert replace(sizes_of(tmp_path), name=whole.name, file_bytes=whole.file_bytes) == whole
    assert whole.file_bytes == whole.weight_bytes or whole.file_bytes


def test_a_gpu_too_small_and_what_would_help() -> None:
    """What does not fit says why, and the advice, followed, fits."""
    sizes = sizes_of(default_model(), dtype="float32")
    needed = make_plan(sizes, asked(on_cuda=True, memory_bytes=16 * GIB))
    assert not needed.problems
    fixed = sum(part.num_bytes for part in needed.parts if part.name in ("weights", "largest step", "buffers of swaps"))
    assert needed.num_gpu_blocks == int(16 * GIB * 0.9 - fixed) // needed.block_bytes
    share = (fixed + 3.5 * needed.block_bytes) / (16 * GIB)
    tight = make_plan(sizes, asked(on_cuda=True, memory_bytes=16 * GIB, utilization=share))
    assert tight.problems and 0 < tight.num_tokens < sizes.max_model_len
    assert any(f"--max-model-len {tight.num_tokens}" in line for line in tight.advice)
    shorter = sizes_of(default_model(), dtype="float32", max_model_len=tight.num_tokens)
    assert not make_plan(shorter, tight.question).problems
    assert make_plan(sizes, asked(memory_bytes=sizes.weight_bytes - 1)).problems


def test_a_gpu_that_others_use() -> None:
    """R9 counts on a share of all of it; where others hold that, the plan names the share that is left, which fits."""
    sizes = sizes_of(default_model())
    taken = make_plan(sizes, asked(on_cuda=True, memory_bytes=16 * GIB, free_bytes=4 * GIB))
    assert len(taken.problems) == 1
    share = float(taken.problems[0].partition("--gpu-memory-utilization ")[2].split()[0])
    assert 0.1 < share < 0.3
    assert not make_plan(sizes, replace(taken.question, utilization=share)).problems


@pytest.mark.parametrize(("family", "kinds"), [("llama", 1), ("gemma2", 2)])
def test_what_a_gpu_holds_for_good_is_planned(family: str, kinds: int, tmp_path: Path) -> None:
    """R9: the workspace of an attention library, for each kind of layer, and two buffers of swaps; fewer blocks by that much."""
    path = make_checkpoint(family, tmp_path)
    worker = {"device": "cuda", "attention_backend": "flashinfer"}
    plain, found = (
        answered(Wanted(folder=path, name="", memory=8 * GIB, worker={**worker, "attention_backend": name}))
        for name in ("auto", "flashinfer")
    )
    parts = {part.name: part.num_bytes for part in found.parts}
    assert parts["attention's workspace"] == 384 * 2**20 + kinds * (8 * 2**20 + 4 * 32768)
    assert parts["buffers of swaps"] == 2 * (16 * 2**20 // found.block_bytes) * found.block_bytes
    fewer = plain.num_gpu_blocks - found.num_gpu_blocks
    assert fewer * found.block_bytes == pytest.approx(parts["attention's workspace"], abs=found.block_bytes)
    assert "attention's workspace" in shown(found) and "attention's workspace" not in shown(plain)


def shown(plan: MemoryPlan) -> str:
    """The picture as text."""
    console = Console(width=120, file=io.StringIO())
    with console.capture() as capture:
        console.print(plan_picture(plan))
    return capture.get()


def test_parts_add_up() -> None:
    """The picture is of all the memory."""
    for question in (asked(), asked(on_cuda=True), asked(cache_bytes=GIB)):
        plan = make_plan(sizes_of(default_model()), question)
        assert sum(part.num_bytes for part in plan.parts) == question.memory_bytes


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A picture with every part for people, JSON for programs, status 1 where it does not fit, 2 for a wrong size."""
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--memory", "2GiB"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0 and all(word in shown for word in ("weights", "KV cache", "it fits", "[W"))
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--memory", "610MiB", "--device", "cuda", "--json"])
    values = json.loads(capsys.readouterr().out)
    assert caught.value.code == 1 and not values["fits"] and values["problems"] and values["advice"]
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--memory", "much"])
    assert caught.value.code == 2 and "--memory" in capsys.readouterr().err


def test_an_automatic_length_fits() -> None:
    """The plan of `--max-model-len auto` has the length that a worker shortens its context to, and no problem."""
    sizes = sizes_of(default_model())
    short, whole = asked(cache_bytes=100 * 16 * 2048), asked(shortens=True)
    refused, shortened = make_plan(sizes, short), make_plan(sizes, replace(short, shortens=True))
    assert refused.problems and not shortened.problems
    assert shortened.sizes.max_model_len == refused.num_tokens < sizes.max_model_len
    assert make_plan(sizes, whole).sizes.max_model_len == sizes.max_model_len
