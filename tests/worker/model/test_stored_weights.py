"""Checkpoints with FP8 weights are served by what these stand for; weights of unknown formats are refused before they are read."""

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
from tests.support.quantized_files import fp8_blocks, set_config, stored_so
from tests.support.worker.driver import Driver, generate, make_engine, new_engine
from tests.support.worker.generated import greedy, reference_model
from worker_svc.model import checkpoint

_BLOCK = 32
_FP8 = dict(fp8_blocks((_BLOCK, _BLOCK)).config)


def load(path: Path) -> None:
    new_engine(path).load(lambda _stage, _fraction: None)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return make_checkpoint("llama", tmp_path / "plain")


# --- FP8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "family"),
    [
        ((_BLOCK, _BLOCK), "llama"),
        pytest.param((_BLOCK, _BLOCK), "qwen3_moe", marks=pytest.mark.long),
        pytest.param((16, 48), "llama", marks=pytest.mark.long),
        ((16, 48), "qwen3_moe"),
        (None, "llama"),
        pytest.param(None, "qwen3_moe", marks=pytest.mark.long),
    ],
    ids=[f"{block}-{family}" for block in ("square", "ragged", "tensor") for family in ("llama", "qwen3_moe")],
)
def test_fp8_is_what_it_stands_for(family: str, block: tuple[int, int] | None, tmp_path: Path) -> None:
    """Tokens and logprobs are those of a plain checkpoint with the dequantized values, for experts and merged matrices too."""
    plain = make_checkpoint(family, tmp_path / "plain")
    path = stored_so(plain, tmp_path / "fp8", fp8_blocks(block))
    engine, prompt = make_engine(path), list(range(40))
    expected = greedy(reference_model(plain), prompt, 16)
    driver = Driver(engine)
    generate(driver, "p", prompt, 16)
    expected.check(driver.tokens["p"], driver.logprobs["p"])
    assert len(set(expected.token_ids)) >= 10
    dtypes = {p.dtype for p in engine._loaded.model._model.parameters()}
    assert dtypes <= {torch.float32}


def test_memory_is_counted_for_what_fp8_becomes(tmp_path: Path) -> None:
    """Where it is dequantized, a byte on disk is four in float32: the check before loading and `quire plan` count these."""
    plain = make_checkpoint("llama", tmp_path / "plain")
    path = stored_so(plain, tmp_path / "fp8", fp8_blocks((_BLOCK, _BLOCK)))
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


def with_other_blocks(path: Path) -> None:
    set_config(path, quantization_config=_FP8 | {"weight_block_size": [24, 24]})


def with_unknown_field(path: Path) -> None:
    set_config(path, quantization_config=_FP8 | {"rotation": "hadamard"})


def with_packed_experts(path: Path) -> None:
    set_config(path, quantization_config=_FP8 | {"expert_dtype": "fp4"})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (without_scales, "has no scales"),
        (with_other_blocks, r"not blocks of 24 x 24"),
        (with_unknown_field, "rotation"),
        (with_packed_experts, "expert_dtype"),
    ],
)
def test_fp8_of_another_kind_is_refused(spoil, words, plain: Path, tmp_path: Path) -> None:
    """Weights whose scales are missing or lie otherwise than is computed with: refused by name, not guessed."""
    path = stored_so(plain, tmp_path / "fp8", fp8_blocks((_BLOCK, _BLOCK)))
    spoil(path)
    with pytest.raises(ConfigError, match=words) as caught:
        load(path)
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"


# --- everything else -------------------------------------------------------------------------------------------------

METHODS = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": []},
    "nonesuch": {"quant_method": "nonesuch", "bits": 3},
    "without a method": {"bits": 4},
    "no object": "awq",
}


@pytest.mark.parametrize("name", METHODS)
def test_refused_before_weights_are_read(name: str, plain: Path, monkeypatch) -> None:
    """Unknown methods, and weights that are not stored as their configuration says: one line with the method and what to do, from a
    worker, `quire plan` and `quire doctor`."""
    set_config(plain, quantization_config=METHODS[name])
    monkeypatch.setattr(checkpoint, "load_model", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(ConfigError) as caught:
        load(plain)
    method = METHODS[name].get("quant_method") if isinstance(METHODS[name], dict) else None
    message = caught.value.message
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"
    assert (method or "quantization_config") in message
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
