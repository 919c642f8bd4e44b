"""Checkpoints with quantized weights: FP8 is served by what it stands for, everything else is refused before weights are read."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.cli import main
from quire_tools.doctor import model as doctor
from quire_tools.doctor.findings import Severity
from quire_tools.plan.model_sizes import model_sizes
from svc_common.errors import ConfigError
from tests.support.checkpoints import make_checkpoint
from tests.support.worker.driver import Driver, generate, make_engine, new_engine
from tests.support.worker.generated import greedy, reference_model
from worker_svc.model import checkpoint

_BLOCK = 32
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK]}
_SKIPPED = "lm_head"


def load(path: Path) -> None:
    new_engine(path).load(lambda _stage, _fraction: None)


def set_config(path: Path, **fields: object) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return path


def with_fp8(source: Path, target: Path, block: tuple[int, int] | None = (_BLOCK, _BLOCK), **fields: object) -> Path:
    """A checkpoint whose linear weights are stored in FP8; `source` gets the values that they stand for, in bfloat16.

    `block` None: one scale for a whole matrix. Norms, embedding and `lm_head` stay as they are.
    """
    tensors = load_file(source / "model.safetensors")
    stored, meant = {}, {}
    for name, value in tensors.items():
        if value.ndim != 2 or value.shape[0] < 8 or "embed" in name or _SKIPPED in name:
            stored[name] = meant[name] = value
            continue
        rows, columns = block or value.shape
        tiles = value.float().unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        scales = tiles.abs().amax((1, 3)) / 448
        rounded = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        stored[name] = rounded.flatten(2).flatten(0, 1).contiguous()
        stored[f"{name}_scale_inv"] = scales if block else scales.reshape(())
        meant[name] = (rounded.float() * scales[:, None, :, None]).flatten(2).flatten(0, 1).to(value.dtype)
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, source / "model.safetensors", metadata={"format": "pt"})
    size = None if block is None else list(block)
    config = _FP8 | {"weight_block_size": size, "modules_to_not_convert": [_SKIPPED], **fields}
    return set_config(target, quantization_config=config)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return make_checkpoint("llama", tmp_path / "plain")


# --- FP8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("block", [(_BLOCK, _BLOCK), (16, 64), None], ids=["square", "wide", "tensor"])
def test_fp8_is_what_it_stands_for(family: str, block: tuple[int, int] | None, tmp_path: Path) -> None:
    """Tokens and logprobs are those of a plain checkpoint with the dequantized values, for experts and merged matrices too."""
    plain = make_checkpoint(family, tmp_path / "plain")
    path = with_fp8(plain, tmp_path / "fp8", block)
    engine, prompt = make_engine(path), list(range(40))
    expected = greedy(reference_model(plain), prompt, 24)
    driver = Driver(engine)
    generate(driver, "p", prompt, 24)
    expected.check(driver.tokens["p"], driver.logprobs["p"])
    assert len(set(expected.token_ids)) >= 10
    dtypes = {p.dtype for p in engine._loaded.model._model.parameters()}
    assert dtypes <= {torch.float32}


def test_memory_is_counted_for_what_fp8_becomes(tmp_path: Path) -> None:
    """A byte on disk is four in float32: the check before loading and `quire plan` count these."""
    plain = make_checkpoint("llama", tmp_path / "plain")
    path = with_fp8(plain, tmp_path / "fp8")
    found = checkpoint.open_checkpoint(path)
    wanted = sum(tensor.nbytes for tensor in load_file(plain / "model.safetensors").values())
    assert found.loaded_bytes(torch.float32) == wanted
    assert found.loaded_bytes(torch.bfloat16) == wanted // 2
    planned = model_sizes(path, dtype="auto", kv_cache_dtype="auto", max_model_len=None).weight_bytes
    assert planned == pytest.approx(wanted, rel=0.01)


def without_scales(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "_scale_inv" not in name}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})


def with_ragged_blocks(path: Path) -> None:
    set_config(path, quantization_config=_FP8 | {"weight_block_size": [48, 48]})


def with_unknown_field(path: Path) -> None:
    set_config(path, quantization_config=_FP8 | {"rotation": "hadamard"})


def with_packed_experts(path: Path) -> None:
    set_config(path, quantization_config=_FP8 | {"expert_dtype": "fp4"})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (without_scales, "has no scales"),
        (with_ragged_blocks, r"blocks of 48 x 48"),
        (with_unknown_field, "rotation"),
        (with_packed_experts, "expert_dtype"),
    ],
)
def test_fp8_of_another_kind_is_refused(spoil, words, plain: Path, tmp_path: Path) -> None:
    """Weights whose scales are missing or lie otherwise than is computed with: refused by name, not guessed."""
    path = with_fp8(plain, tmp_path / "fp8")
    spoil(path)
    with pytest.raises(ConfigError, match=words) as caught:
        load(path)
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"


# --- everything else -------------------------------------------------------------------------------------------------

METHODS = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": []},
    "nonesuch": {"quant_method": "nonesuch", "bits": 3},
    "without a method": {"bits": 4},
    "no object": "awq",
}


@pytest.mark.parametrize("name", METHODS)
def test_other_methods_are_refused_before_weights_are_read(name: str, plain: Path, monkeypatch) -> None:
    """One line with the method and what to do, from a worker, `quire plan` and `quire doctor`; weights need not be there."""
    set_config(plain, quantization_config=METHODS[name])
    monkeypatch.setattr(checkpoint, "load_model", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(ConfigError) as caught:
        load(plain)
    method = METHODS[name].get("quant_method") if isinstance(METHODS[name], dict) else None
    message = caught.value.message
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"
    assert (repr(method) if method else "quantization_config") in message
    assert "unquantized" in message and "\n" not in message
    with pytest.raises(ConfigError) as planned:
        model_sizes(plain, dtype="auto", kv_cache_dtype="auto", max_model_len=None)
    assert planned.value.message == message
    [finding] = [found for found in doctor.folder(plain) if found.state is Severity.PROBLEM]
    assert finding.what in message and "unquantized" in finding.to_do


@pytest.mark.parametrize("where", ["text_config", "compression_config", "hf_quant_config.json", "quantize_config.json"])
def test_other_places_where_it_is_said(where: str, plain: Path) -> None:
    """In the text model's part, by the old name of compressed-tensors, in files beside config.json."""
    if where == "text_config":
        set_config(plain, text_config={"quantization_config": METHODS["awq"]})
    elif where == "compression_config":
        set_config(plain, compression_config=METHODS["compressed-tensors"])
    else:
        (plain / where).write_text("{}")
    with pytest.raises(ConfigError, match="unquantized") as caught:
        load(plain)
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_weights_that_nothing_explains(dtype: torch.dtype, plain: Path) -> None:
    """Weights of a byte each, and no word on how they were made: they are not taken for plain numbers."""
    tensors = load_file(plain / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name].to(dtype)}, plain / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=name) as caught:
        load(plain)
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"


def test_the_commands_say_it_in_one_line(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`quire plan` and `quire doctor` end with the sentence, not with a traceback."""
    set_config(plain, quantization_config=METHODS["awq"])
    for command, status in (("plan", 2), ("doctor", 1)):
        with pytest.raises(SystemExit) as caught:
            main([command, "--model", str(plain)])
        shown = capsys.readouterr()
        assert caught.value.code == status
        assert "quant_method 'awq'" in " ".join((shown.out + shown.err).split())
