"""Quantized safetensors checkpoints: served as the model that their weights stand for; what is not known is refused by name."""

import json
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged_kernels.quantized import QuantizedWeight, dense
from quire_tools.plan.model_sizes import ModelSizes, model_sizes
from svc_common.errors import ConfigError
from tests.kernels.test_quantized import group_sums
from tests.support.checkpoints import make_checkpoint
from tests.support.quantized_files import (
    Stored,
    awq,
    float_quantized,
    fp4,
    fp8_blocks,
    fp8_static,
    gptq,
    int_quantized,
    pack_quantized,
    set_config,
    stored_so,
)
from tests.support.worker.driver import Driver, generate, make_engine
from tests.support.worker.generated import greedy, reference_model
from tests.worker.model.folders import WIDE, Folders
from tests.worker.model.test_quantization import deviation, loaded, logits_of
from worker_svc.model import checkpoint
from worker_svc.model.fused.packed_linear import PackedLinear
from worker_svc.model.loading import LoadedModel

PROMPT = list(range(40))
INTEGERS: dict[str, Stored] = {
    "w4a16-32": pack_quantized(4, 32),
    "w4a16-64-zeros": pack_quantized(4, 64, symmetric=False),
    "w4a16-128": pack_quantized(4, 128),
    "w4a16-channel": pack_quantized(4, None),
    "w4a16-channel-zeros": pack_quantized(4, None, symmetric=False),
    "w8a16-128-zeros": pack_quantized(8, 128, symmetric=False),
    "w8a8": int_quantized(),
    "w8a8-zeros": int_quantized(symmetric=False),
    "w8a8-tensor": int_quantized(strategy="tensor"),
    "awq-128": awq(128),
    "awq-64": awq(64),
    "awq-32": awq(32),
    "gptq-128": gptq(4, 128, sym=True),
    "gptq-32-zeros": gptq(4, 32, sym=False),
    "gptq-v2-zeros": gptq(4, 64, sym=False, v2=True),
    "gptq-8-bit-zeros": gptq(8, 128, sym=False),
    "gptq-column": gptq(4, -1, sym=True),
    "mxfp4": fp4(32),
    "nvfp4": fp4(16),
}
"""Kept as integers."""
FLOATS: dict[str, Stored] = {
    "fp8-channel": float_quantized((1, 0)),
    "fp8-tensor": float_quantized((0, 0)),
    "fp8-block-32": float_quantized((32, 32)),
    "deepseek": fp8_blocks((128, 128)),
    "deepseek-tensor": fp8_blocks(None),
    "fp8-static": fp8_static(),
}
"""Kept as E4M3 numbers."""
DEQUANTIZED: dict[str, Stored] = {
    "gptq-act-order": gptq(4, 32, sym=True, act_order=True),
    "gptq-v2-act-order-zeros": gptq(8, 64, sym=False, v2=True, act_order=True),
    "groups-of-8": pack_quantized(4, 8),
    "fp8-block": float_quantized((48, 48)),
    "deepseek-ragged": fp8_blocks((48, 40)),
}
ALL = INTEGERS | FLOATS | DEQUANTIZED
ROUNDED_ROWS = 0.1
"""Most that logits of these models may be off, of their size: rows are rounded to 8 bits in each group."""


def planned_sizes(path: Path, *, packs: bool) -> ModelSizes:
    """Of a CPU that packs, or of a GPU."""
    kept = (torch.int8, torch.float8_e4m3fn) if packs else (torch.float8_e4m3fn,)
    return model_sizes(path, dtype="auto", kv_cache_dtype="auto", max_model_len=None, packs=kept)


def check_products(model: LoadedModel, meant: dict[str, torch.Tensor]) -> int:
    """Compare products of random rows with those of the values meant; returns the number of modules with integers.

    Each is off by at most half of a row's step in each group, times the magnitudes of the group's weights (test_quantized.py).
    """
    modules = {name: module for name, module in model.model._model.named_modules() if isinstance(module, PackedLinear)}
    kept = {name: module for name, module in modules.items() if module.weights.form.stored != "plain"}
    for name, module in kept.items():
        group, weight = module.weights.form.group, meant[f"{name}.weight"].double()
        rows = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(0))
        steps = rows.double().unflatten(1, (-1, min(group, weight.shape[1]))).abs().amax(2) / 127
        bias = meant.get(f"{name}.bias", torch.zeros(len(weight))).double()
        off = (module(rows).double() - bias - rows.double() @ weight.T).abs()
        assert (off <= 0.501 * (steps @ group_sums(weight.abs(), group).T) + 1e-4).all()
    return len(kept)


def linear_bytes(path: Path) -> int:
    """Bytes of the quantized weights in float32."""
    values = [read() for read in checkpoint.open_checkpoint(path).reader.tensors(torch.float32).values()]
    return 4 * sum(prod(value.numbers.shape) for value in values if isinstance(value, QuantizedWeight))


@pytest.mark.parametrize("name", ALL)
def test_values_are_exact(name: str, tmp_path: Path) -> None:
    """Each weight is, bit by bit, what its tensors stand for; numbers are kept where they can be."""
    source = make_checkpoint("llama", tmp_path / "source", **WIDE)
    path = stored_so(source, tmp_path / "stored", ALL[name])
    meant = load_file(source / "model.safetensors")
    reader = checkpoint.open_checkpoint(path).reader
    assert reader is not None and reader.is_quantized
    assert reader.has_integers is not ("fp8" in name or "deepseek" in name)
    found = {name: read() for name, read in reader.tensors(torch.float32).items()}
    assert found.keys() == meant.keys()
    tolerance = 1e-6 if name == "nvfp4" else 0  # a quotient of scales is rounded
    for key, expected in meant.items():
        torch.testing.assert_close(dense(found[key]), expected, rtol=tolerance, atol=0)
    kept = {key for key, value in found.items() if isinstance(value, QuantizedWeight)}
    assert len(kept) == (0 if name in DEQUANTIZED else 14)
    assert reader.num_elements == sum(value.numel() for value in meant.values())


# --- engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param("llama", "w4a16-128", marks=pytest.mark.long),
        pytest.param("qwen2", "w8a8-zeros", marks=pytest.mark.long),
        ("qwen3", "awq-64"),
        ("llama", "gptq-32-zeros"),
        pytest.param("qwen2", "gptq-act-order", marks=pytest.mark.long),
        pytest.param("qwen3", "mxfp4", marks=pytest.mark.long),
        ("llama", "fp8-block"),
        ("qwen3", "deepseek"),
        ("qwen3_moe", "w4a16-32"),
        ("qwen3_moe", "fp8-block-32"),
    ],
)
def test_tokens_are_those_of_the_dequantized_model(family: str, name: str, tmp_path: Path) -> None:
    """Module by module in float32: tokens and logprobs of transformers with the values that are meant, experts included."""
    source = make_checkpoint(family, tmp_path / "source", **WIDE)
    path = stored_so(source, tmp_path / "stored", ALL[name])
    expected = greedy(reference_model(source), PROMPT, 16)
    driver = Driver(make_engine(path, dtype="float32", fuse=False))
    generate(driver, "p", PROMPT, 16)
    expected.check(driver.tokens["p"], driver.logprobs["p"])
    assert len(set(expected.token_ids)) >= 10


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "w4a16-128"),
        pytest.param("qwen3", "w4a16-64-zeros", marks=pytest.mark.long),
        ("qwen2", "w8a8"),
        ("qwen2", "awq-128"),
        pytest.param("qwen3", "gptq-128", marks=pytest.mark.long),
        pytest.param("llama", "gptq-8-bit-zeros", marks=pytest.mark.long),
        ("llama", "mxfp4"),
    ],
)
def test_products_of_integers(family: str, name: str, tmp_path: Path, caplog) -> None:
    """On the CPU's kernels the stored integers are multiplied: each product is within the stated error of that with the values
    that are meant, and so logits are close; their bits do not depend on chunks."""
    caplog.set_level("INFO")
    source = make_checkpoint(family, tmp_path / "source", **WIDE)
    path = stored_so(source, tmp_path / "stored", ALL[name])
    model, plain = loaded(path, dtype="float32"), loaded(source, dtype="float32")
    assert model.model.is_fused
    assert "dequantized" not in caplog.text
    assert check_products(model, load_file(source / "model.safetensors")) == 14
    whole, full = logits_of(model, [PROMPT]), logits_of(plain, [PROMPT])
    assert 0 < deviation(whole, full) < ROUNDED_ROWS
    assert torch.equal(logits_of(model, [PROMPT[:1], PROMPT[1:9], PROMPT[9:]]), whole)
    planned = planned_sizes(path, packs=True)
    assert model.model.weight_bytes == pytest.approx(planned.weight_bytes, rel=0.01)
    assert plain.model.weight_bytes - model.model.weight_bytes > 0.6 * linear_bytes(path)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "fp8-channel"),
        pytest.param("qwen3", "fp8-channel", marks=pytest.mark.long),
        ("qwen3", "fp8-tensor"),
        ("llama", "fp8-block-32"),
        ("qwen3", "deepseek"),
        pytest.param("llama", "deepseek", marks=pytest.mark.long),
        ("llama", "deepseek-tensor"),
    ],
)
def test_fp8_is_multiplied_as_it_is_stored(family: str, name: str, tmp_path: Path, caplog) -> None:
    """Tokens and logprobs are those of transformers with the values meant, in a quarter of float32's memory; bits do not
    depend on chunks."""
    caplog.set_level("INFO")
    source = make_checkpoint(family, tmp_path / "source", **WIDE)
    path = stored_so(source, tmp_path / "stored", ALL[name])
    driver = Driver(make_engine(path, dtype="float32"))
    model = driver.engine._loaded
    assert model.model.is_fused
    assert "dequantized" not in caplog.text
    forms = [part.weights.form.stored for part in model.model._model.modules() if isinstance(part, PackedLinear)]
    assert forms.count("fp8") == 14 and set(forms) <= {"fp8", "plain"}
    expected = greedy(reference_model(source), PROMPT, 16)
    generate(driver, "p", PROMPT, 16)
    expected.check(driver.tokens["p"], driver.logprobs["p"])
    assert len(set(expected.token_ids)) >= 10
    model = loaded(path, dtype="float32")
    whole = logits_of(model, [PROMPT])
    assert torch.equal(logits_of(model, [PROMPT[:1], PROMPT[1:9], PROMPT[9:]]), whole)
    planned = planned_sizes(path, packs=True)
    assert model.model.weight_bytes == pytest.approx(planned.weight_bytes, rel=0.01)
    full = loaded(source, dtype="float32").model.weight_bytes
    assert full - model.model.weight_bytes > 0.7 * linear_bytes(path)


def test_large_scales_of_fp8(tmp_path: Path, caplog) -> None:
    """Kernels multiply scales with a power of two, which must not overflow: a matrix with such scales is dequantized."""
    caplog.set_level("INFO")
    path = stored_so(make_checkpoint("llama", tmp_path / "source", **WIDE), tmp_path / "stored", ALL["fp8-channel"])
    tensors = load_file(path / "model.safetensors")
    tensors[f"{QUERIES}.weight_scale"][3] = 256
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    model = loaded(path, dtype="float32")
    assert (
        "1 of 14 quantized weights (compressed-tensors) are dequantized to float32: FP8 with scales of 256"
        in caplog.text
    )
    assert logits_of(model, [PROMPT]).isfinite().all()


def test_scales_of_a_kv_cache_are_not_used(tmp_path: Path) -> None:
    """Those of a checkpoint, for all tokens: a cache computes its own, for each token and kv head."""
    path = stored_so(make_checkpoint("llama", tmp_path / "source", **WIDE), tmp_path / "stored", ALL["fp8-channel"])
    expected = logits_of(loaded(path, dtype="float32", kv_cache_dtype="fp8"), [PROMPT[:9], PROMPT[9:]])
    scales = {f"model.layers.{i}.self_attn.{name}_scale": torch.tensor(0.03) for i in range(2) for name in "kv"}
    tensors = load_file(path / "model.safetensors") | scales
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    set_config(path, quantization_config=ALL["fp8-channel"].config | {"kv_cache_scheme": scheme})
    found = logits_of(loaded(path, dtype="float32", kv_cache_dtype="fp8"), [PROMPT[:9], PROMPT[9:]])
    assert torch.equal(found, expected)


def test_dequantized_weights_are_named_in_the_log(tmp_path: Path, caplog) -> None:
    """Groups of other sizes or that follow activations, merged experts: multiplied as full weights, and said so."""
    caplog.set_level("INFO")
    for family, name, words in (
        (
            "llama",
            "fp8-block",
            "14 of 14 quantized weights (compressed-tensors) are dequantized to float32: groups of 48",
        ),
        ("llama", "gptq-act-order", "(gptq) are dequantized to float32: groups in the order of activations (g_idx)"),
        ("llama", "groups-of-8", "are dequantized to float32: groups of 8"),
        ("qwen3_moe", "w4a16-32", "24 of 32 quantized weights are dequantized, because transformers merges them"),
    ):
        source = make_checkpoint(family, tmp_path / f"{name}-source", **WIDE)
        path = stored_so(source, tmp_path / name, ALL[name])
        model = loaded(path, dtype="float32")
        assert words in caplog.text
        assert (model.model.quantized_bytes > 0) is (family == "qwen3_moe")
        if family == "llama":
            assert torch.equal(logits_of(model, [PROMPT]), logits_of(loaded(source, dtype="float32"), [PROMPT]))


def test_float16_is_for_other_kernels(tmp_path: Path, caplog) -> None:
    """`--dtype auto` of a float16 checkpoint is bfloat16 where integers are multiplied; asked for, float16 dequantizes them."""
    caplog.set_level("INFO")
    source = make_checkpoint("llama", tmp_path / "source", dtype="float16", **WIDE)
    path = stored_so(source, tmp_path / "stored", awq(32))
    assert loaded(path).dtype == torch.bfloat16
    assert "--dtype auto: bfloat16" in caplog.text
    assert loaded(path, dtype="float16").model.quantized_bytes == 0
    assert "weights are dequantized to float16" in caplog.text
    assert planned_sizes(path, packs=True).dtype == "bfloat16"
    assert planned_sizes(path, packs=False).dtype == "float16"


def test_plans_without_weights(tmp_path: Path) -> None:
    """Of config.json alone: what it does not quantize is counted in full. On a GPU all but FP8 is."""
    for name in ("awq-32", "gptq-32-zeros", "w4a16-32", "mxfp4", "fp8-channel"):
        source = make_checkpoint("llama", tmp_path / f"{name}-source", **WIDE)
        path = stored_so(source, tmp_path / name, ALL[name])
        whole, on_a_gpu = planned_sizes(path, packs=True), planned_sizes(path, packs=False)
        (path / "model.safetensors").unlink()
        assert planned_sizes(path, packs=True).weight_bytes == whole.weight_bytes
        assert whole.weight_bytes < whole.loaded_bytes
        assert on_a_gpu.weight_bytes == (whole.weight_bytes if name == "fp8-channel" else whole.loaded_bytes)


def test_tensors_in_several_files(tmp_path: Path) -> None:
    """A matrix's numbers and scales need not be in one shard."""
    source = make_checkpoint("llama", tmp_path / "source", **WIDE)
    path = stored_so(source, tmp_path / "stored", gptq(4, 32, sym=False))
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    shards = {f"{i}.safetensors": dict(list(tensors.items())[i::2]) for i in range(2)}
    for file, part in shards.items():
        save_file(part, path / file)
    places = {name: file for file, part in shards.items() for name in part}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    found = checkpoint.open_checkpoint(path).reader.tensors(torch.float32)
    meant = load_file(source / "model.safetensors")
    assert all(torch.equal(dense(found[name]()), meant[name]) for name in meant)


# --- refusals --------------------------------------------------------------------------------------------------------


def changed(config: object, where: str, value: object) -> dict:
    """A copy with another value at a dotted path."""
    copy = json.loads(json.dumps(config))
    *parts, last = where.split(".")
    inner = copy
    for part in parts:
        inner = inner[part]
    inner[last] = value
    return copy


_W = "config_groups.group_0.weights"


@pytest.mark.parametrize(
    ("name", "where", "value", "words"),
    [
        ("gptq-128", "bits", 3, r"GPTQ weights with bits=3 .*: 4 and 8 are supported"),
        ("gptq-128", "checkpoint_format", "marlin", "checkpoint_format='marlin'.*'gptq' and 'gptq_v2'"),
        ("gptq-128", "group_size", 0, "group_size=0"),
        ("gptq-128", "group_size", 64, r"qzeros.*not|scales of shape"),
        ("gptq-128", "dynamic", {"+:.*up.*": {"bits": 8}}, "dynamic="),
        ("gptq-128", "rotation", "hadamard", "rotation='hadamard'"),
        ("gptq-128", "pack_dtype", "int16", "pack_dtype='int16'"),
        ("gptq-128", "nonesuch", 1, "nonesuch=1"),
        ("awq-128", "bits", 8, "AWQ weights with bits=8"),
        ("awq-128", "version", "gemv", "version='gemv'"),
        ("awq-128", "version", None, "version=None"),
        ("awq-128", "zero_point", False, "zero_point=False"),
        ("awq-128", "group_size", 32, "scales of shape"),
        ("w4a16-128", "format", "marlin-24", "format='marlin-24'"),
        ("w4a16-128", "config_groups.group_0.format", "mxfp6-pack-quantized", "format='mxfp6-pack-quantized'"),
        ("w4a16-128", f"{_W}.num_bits", 3, "num_bits=3"),
        ("w4a16-128", f"{_W}.type", "float", "type='float'"),
        ("w4a16-128", f"{_W}.strategy", "attn_head", "strategy='attn_head'"),
        ("w4a16-128", f"{_W}.group_size", 64, "weight_scale of shape"),
        ("w4a16-128", f"{_W}.symmetric", False, "has no zero points for"),
        ("w4a16-128", f"{_W}.dynamic", True, "dynamic=True"),
        ("w4a16-128", f"{_W}.nonesuch", 1, r"config_groups.group_0.weights with nonesuch=1"),
        (
            "w4a16-128",
            "config_groups.group_0.targets",
            ["re:.*up_proj"],
            "quantization_config does not say how to read it",
        ),
        ("w4a16-128", "config_groups.group_0.targets", ["re:*"], r"targets='re:\*'"),
        ("w4a16-128", "config_groups", {"W4A16": ["Linear"]}, "config_groups.W4A16="),
        ("w4a16-128", "quantization_status", "frozen", "quantization_status='frozen'"),
        ("w4a16-128", "sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config=.*sparse-24-bitmask"),
        ("w4a16-128", "transform_config", {"config_groups": {"R1": {}}}, "transform_config="),
        ("mxfp4", f"{_W}.group_size", 64, "group_size=64.*32 is supported"),
        ("fp8-block", f"{_W}.block_structure", [128], "block_structure="),
    ],
)
def test_unknown_fields_are_refused(
    name: str, where: str, value: object, words: str, folders: Folders, tmp_path: Path, monkeypatch
) -> None:
    """Before weights are read, with the field, its value and what to do."""
    monkeypatch.setattr(checkpoint, "load_model", lambda *_: pytest.fail("weights are read"))
    path = folders.copy(name, ALL[name], tmp_path)
    set_config(path, quantization_config=changed(ALL[name].config, where, value))
    with pytest.raises(ConfigError, match=words) as caught:
        loaded(path)
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"
    assert "take the model's unquantized checkpoint" in caught.value.message
    assert "\n" not in caught.value.message


QUERIES = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "tensor", "value", "words"),
    [
        ("awq-128", f"{QUERIES}.qzeros", None, "has no zero points for"),
        ("awq-128", f"{QUERIES}.qweight", None, f"has {QUERIES}.(qzeros|scales), and no quantized weights"),
        ("awq-128", f"{QUERIES}.weight", torch.zeros(128, 128), "has both"),
        ("awq-128", "model.layers.0.mlp.act_fn.scales", torch.ones(256), "and no quantized weights for it"),
        ("gptq-128", f"{QUERIES}.g_idx", torch.full((128,), 7, dtype=torch.int32), "g_idx of .* not from 0 to 0"),
        ("gptq-128", f"{QUERIES}.bias", torch.ones(128), "bias, which transformers' class of this model does not add"),
        ("w4a16-128", f"{QUERIES}.weight_shape", torch.tensor([128, 120]), "weight_shape that"),
        ("w4a16-128", f"{QUERIES}.weight_shape", None, "lacks .*weight_shape"),
        ("w8a8", f"{QUERIES}.weight_scale", torch.ones(128, 1).int(), "weight_scale as I32"),
        ("nvfp4", f"{QUERIES}.weight_global_scale", None, "lacks .*weight_global_scale"),
    ],
)
def test_tensors_that_contradict_each_other_are_refused(
    name: str, tensor: str, value, words: str, folders: Folders, tmp_path: Path
) -> None:
    path = folders.copy(name, ALL[name], tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors.pop(tensor, None)
    save_file(
        tensors | ({} if value is None else {tensor: value}), path / "model.safetensors", metadata={"format": "pt"}
    )
    with pytest.raises(ConfigError, match=words) as caught:
        loaded(path)
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"


def test_biases_of_zero_are_no_error(tmp_path: Path) -> None:
    """AutoGPTQ stores them for modules without a bias."""
    path = stored_so(make_checkpoint("llama", tmp_path / "source", **WIDE), tmp_path / "stored", ALL["gptq-128"])
    tensors = load_file(path / "model.safetensors") | {f"{QUERIES}.bias": torch.zeros(128)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert loaded(path).model.quantized_bytes > 0


def test_rounding_of_integers_is_refused(tmp_path: Path) -> None:
    """`--quantization` beside integers; FP8 may be rounded."""
    source = make_checkpoint("llama", tmp_path / "source", **WIDE)
    path = stored_so(source, tmp_path / "stored", ALL["w8a8"])
    with pytest.raises(ConfigError, match="--quantization int4 rounds unquantized weights") as caught:
        loaded(path, quantization="int4")
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"
    path = stored_so(source, tmp_path / "fp8", ALL["fp8-channel"])
    model = loaded(path, quantization="int8").model._model
    stored = {part.weights.form.stored for part in model.modules() if isinstance(part, PackedLinear)}
    assert stored == {"int8"}


@pytest.mark.parametrize("where", ["quantize_config.json", "quant_config.json"])
def test_settings_in_files_of_their_own(where: str, tmp_path: Path) -> None:
    """Of older tools: in place of quantization_config, or beside one that leaves fields out."""
    stored = gptq(4, 32, sym=False, v2=True) if where == "quantize_config.json" else awq(32)
    source = make_checkpoint("llama", tmp_path / "source", **WIDE)
    path = stored_so(source, tmp_path / "stored", stored, quantization_config=None)
    config = {field: value for field, value in stored.config.items() if field != "quant_method"}
    if "version" in config:
        config = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (path / where).write_text(json.dumps(config))
    meant = load_file(source / "model.safetensors")
    for said in (None, {name: stored.config[name] for name in ("quant_method", "bits", "group_size")}):
        set_config(path, quantization_config=said)
        found = checkpoint.open_checkpoint(path).reader.tensors(torch.float32)
        assert all(torch.equal(dense(found[name]()), meant[name]) for name in meant)
