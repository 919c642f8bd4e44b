"""GGUF files: served as the model that their weights stand for, with their tokenizer; what is not known is refused."""

import json
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from tokenizers import Tokenizer
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from protos.worker.v1 import worker_pb2
from svc_common.errors import ConfigError
from tests.support.checkpoints import EOS_TOKEN_ID, make_checkpoint
from tests.support.gguf_files import random_blocks, to_gguf
from tests.support.worker.driver import Driver, generate, make_engine
from tests.support.worker.generated import greedy, reference_model
from tests.worker.model.test_quantization import deviation, loaded, logits_of
from worker_svc.model import checkpoint
from worker_svc.model.gguf.blocks import quantized_weight
from worker_svc.model.gguf.header import QUANTIZED

DEEP = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.1}
"""Matrices that hold super-blocks of 256."""
PROMPT = list(range(40))


def q4_k_m(name: str) -> Kind:
    """As llama-quantize mixes them: values and the second matrix of half of the layers in 6 bits, so is the head."""
    if name in {"output.weight", "token_embd.weight"} or (
        name.startswith("blk.0.") and name.split(".")[2] in {"attn_v", "ffn_down"}
    ):
        return Kind.Q6_K
    return Kind.Q5_K if "attn_output" in name else Kind.Q4_K


def all_of(kind: Kind):
    return lambda _name: kind


def served(path: Path, **options: object) -> tuple[Driver, list[int]]:
    """16 tokens after the prompt."""
    driver = Driver(make_engine(path, **options))
    generate(driver, "p", PROMPT, 16)
    return driver, driver.tokens["p"]


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(QUANTIZED), ids=lambda kind: kind.name)
def test_blocks_map_exactly(kind: Kind) -> None:
    """Every bit of the weights that llama.cpp's own package makes of a block."""
    data = random_blocks(kind, 7, 768)
    found = quantized_weight(data, kind, torch.float32)
    assert torch.equal(found.dequantized(), torch.from_numpy(dequantize(data, kind)))
    assert found.numbers.unique().numel() >= 16


@pytest.mark.parametrize(
    ("family", "kind_of", "shape"),
    [
        ("llama", all_of(Kind.Q8_0), {}),
        ("llama", all_of(Kind.F16), {"tie_word_embeddings": True}),
        ("llama", all_of(Kind.BF16), {"head_dim": 32, "attention_bias": True, "mlp_bias": True}),
        ("qwen2", all_of(Kind.Q4_0), {"tie_word_embeddings": True}),
        ("qwen3", all_of(Kind.Q5_1), {}),
        pytest.param("qwen3", all_of(Kind.Q4_1), {}, marks=pytest.mark.long),
        pytest.param("llama", q4_k_m, DEEP, marks=pytest.mark.long),
        ("qwen2", q4_k_m, DEEP | {"tie_word_embeddings": True}),
    ],
    ids=["q8_0", "f16-tied", "bf16-biases", "q4_0-tied", "q5_1", "q4_1", "k", "k-tied"],
)
def test_tokens_are_those_of_the_dequantized_model(family, kind_of, shape, tmp_path: Path) -> None:
    """Module by module in float32: tokens and logprobs of transformers with the dequantized weights."""
    source = make_checkpoint(family, tmp_path / "source", **shape)
    path = to_gguf(source, tmp_path / "tiny.gguf", kind_of)
    expected = greedy(reference_model(source), PROMPT, 16)
    driver, tokens = served(path, dtype="float32", fuse=False)
    expected.check(tokens, driver.logprobs["p"])
    assert len(set(expected.token_ids)) >= 10


@pytest.mark.parametrize(
    ("family", "kind_of", "shape"),
    [
        ("llama", all_of(Kind.Q8_0), {}),
        ("qwen2", all_of(Kind.Q4_0), {"tie_word_embeddings": True}),
        ("llama", q4_k_m, DEEP),
    ],
    ids=["q8_0", "q4_0-tied", "k"],
)
def test_products_of_integers(family, kind_of, shape, tmp_path: Path) -> None:
    """On the CPU's kernels the stored integers are multiplied: off by the rounding of rows alone; bits do not depend on chunks."""
    source = make_checkpoint(family, tmp_path / "source", **shape)
    path = to_gguf(source, tmp_path / "tiny.gguf", kind_of)
    model, plain = loaded(path, dtype="float32"), loaded(source, dtype="float32")
    assert model.model.is_fused
    assert (
        model.model.quantized_bytes
        > 0.8 * model.model.weight_bytes / (2 if shape.get("tie_word_embeddings") else 1) / 4
    )
    whole = logits_of(model, [PROMPT])
    assert 0 < deviation(whole, logits_of(plain, [PROMPT])) < 0.05
    assert torch.equal(logits_of(model, [PROMPT[:1], PROMPT[1:9], PROMPT[9:]]), whole)
    assert model.model.weight_bytes < plain.model.weight_bytes


def test_llama_3_scales_positions(tmp_path: Path) -> None:
    """Frequencies divided by the file's factors are those of transformers' own rule."""
    rope = {
        "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    source = make_checkpoint("llama", tmp_path / "source", rope_parameters=rope, head_dim=32)
    config = AutoConfig.from_pretrained(source)
    plain = 10_000.0 ** -(torch.arange(0, 32, 2) / 32)
    factors = plain / ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]
    path = to_gguf(source, tmp_path / "tiny.gguf", all_of(Kind.Q8_0), rope_factors=factors.tolist())
    expected = greedy(reference_model(source), PROMPT, 16)
    driver, tokens = served(path, dtype="float32", fuse=False)
    expected.check(tokens, driver.logprobs["p"])
    assert factors.max() > 7.99


# --- tokenizer and settings ------------------------------------------------------------------------------------------


def test_the_file_brings_tokenizer_and_template(tmp_path: Path) -> None:
    """The bundle of a gateway: the same ids, special tokens, template and ends as those of the checkpoint."""
    source = make_checkpoint("llama", tmp_path / "source")
    path = to_gguf(source, tmp_path / "tiny.gguf", all_of(Kind.Q8_0), **{"tokenizer.ggml.eot_token_id": 300})
    model = loaded(path)
    bundle = worker_pb2.ModelBundle.FromString(model.bundle)
    found, own = Tokenizer.from_str(bundle.tokenizer_json.decode()), Tokenizer.from_file(str(source / "tokenizer.json"))
    text = "the Größe, 中文  und\n\ttabs 123 <s>x</s>"
    assert found.encode(text).ids == own.encode(text).ids
    assert found.decode(found.encode("größer 中").ids) == "größer 中"
    assert bundle.chat_template == json.loads((source / "tokenizer_config.json").read_text())["chat_template"]
    assert dict(bundle.special_tokens) == {"bos_token": "<s>", "eos_token": "</s>"}
    assert list(model.limits.eos_token_ids) == [300, EOS_TOKEN_ID]
    assert model.limits.model == "tiny"
    assert model.limits.dtype == "bfloat16"


def test_texts_begin_with_the_token_that_the_file_wants(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "source")
    path = to_gguf(source, tmp_path / "tiny.gguf", all_of(Kind.Q8_0), **{"tokenizer.ggml.add_bos_token": True})
    folder = checkpoint.open_checkpoint(path).path
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("ab").ids
    assert ids[0] == 510 and len(ids) == 3


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        ({"general.architecture": "mamba"}, "MODEL_UNSUPPORTED", "architecture 'mamba'.*llama, qwen2, qwen3"),
        ({"ARCH.attention.sliding_window": 64}, "MODEL_UNSUPPORTED", "llama.attention.sliding_window"),
        ({"ARCH.expert_count": 8}, "MODEL_UNSUPPORTED", "llama.expert_count"),
        ({"ARCH.rope.scaling.type": "longrope"}, "MODEL_UNSUPPORTED", "scales positions by 'longrope'"),
        ({"ARCH.rope.dimension_count": 8}, "MODEL_UNSUPPORTED", "differ in width"),
        ({"ARCH.block_count": None}, "MODEL_INCOMPLETE", "lacks llama.block_count"),
        ({"split.count": 2}, "MODEL_UNSUPPORTED", "llama-gguf-split --merge"),
        ({"tokenizer.ggml.model": "bert"}, "MODEL_UNSUPPORTED", "tokenizer of the kind 'bert'"),
        ({"tokenizer.ggml.pre": "nonesuch"}, "MODEL_UNSUPPORTED", "splits texts as 'nonesuch'"),
    ],
)
def test_unknown_metadata_is_refused(changes, reason, words, tmp_path: Path) -> None:
    path = to_gguf(make_checkpoint("llama", tmp_path / "source"), tmp_path / "tiny.gguf", all_of(Kind.F16), **changes)
    with pytest.raises(ConfigError, match=words) as caught:
        loaded(path)
    assert caught.value.reason == reason


def test_unknown_weights_are_refused(tmp_path: Path, monkeypatch) -> None:
    """Types without a reader, `--quantization` of quantized ones, broken and misnamed files: before weights are read."""
    source = make_checkpoint("llama", tmp_path / "source")
    path = to_gguf(source, tmp_path / "odd.gguf", all_of(Kind.Q8_0))
    monkeypatch.setattr(checkpoint, "load_model", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(ConfigError, match="--quantization int4 rounds unquantized weights") as caught:
        loaded(path, quantization="int4")
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"
    monkeypatch.setattr("worker_svc.model.gguf.header.QUANTIZED", frozenset())
    with pytest.raises(ConfigError, match=r"as Q8_0, which is not supported; convert the model again") as caught:
        loaded(path)
    assert caught.value.reason == "QUANTIZATION_UNSUPPORTED"
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\x07" * 60)
    with pytest.raises(ConfigError, match="cannot be read as GGUF"):
        loaded(tmp_path / "broken.gguf")
    (tmp_path / "weights.bin").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"or a \.gguf file"):
        loaded(tmp_path / "weights.bin")
