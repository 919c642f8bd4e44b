"""Which part of each weight a rank loads, and which models are refused before any weight is read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from paged_kernels.quantized import quantized
from svc_common.errors import ConfigError
from tests.support.checkpoints import make_checkpoint
from tests.support.quantized_files import fp8_blocks, stored_so
from worker_svc.model.checkpoint import load_model, model_class, open_checkpoint
from worker_svc.model.sharding.plan import sharded
from worker_svc.model.sharding.shards import Shard

Tensors = dict[str, torch.Tensor]


def refusal(path: Path, size: int) -> str:
    found = open_checkpoint(path)
    with pytest.raises(ConfigError) as caught:
        sharded(found, model_class(found), 0, size)
    assert caught.value.reason == "TENSOR_PARALLEL"
    return caught.value.message


def loaded(path: Path) -> tuple[Tensors, list[Tensors], Shard]:
    """The weights of a whole model and of each of two ranks; the parts of rank 1."""
    found = open_checkpoint(path)
    cls = model_class(found)
    whole = load_model(found, cls, torch.float32, "eager", lambda _done: None)[0].state_dict()
    parts = []
    for rank in range(2):
        own, own_class, shard = sharded(found, cls, rank, 2)
        model, _ = load_model(own, own_class, torch.float32, "eager", lambda _done: None)
        assert own.loaded_bytes(torch.float32) == 4 * model.num_parameters()
        parts.append(model.state_dict())
    return whole, parts, shard


def check_parts(whole: Tensors, parts: list[Tensors], shard: Shard) -> None:
    assert parts[0].keys() == whole.keys()
    for name, weight in whole.items():
        part = shard.of(name)
        pair = [one[name] for one in parts]
        if part is None:
            assert all(torch.equal(one, weight) for one in pair), name
        elif weight.ndim == 1 and part.axis == 1:
            assert torch.equal(pair[0], weight) and not pair[1].any() and weight.any(), name
        else:
            assert torch.equal(torch.cat(pair, part.axis), weight), name
    assert sum(part.numel() for part in parts[0].values()) < 0.75 * sum(weight.numel() for weight in whole.values())


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"attention_bias": True}),
        ("mixtral", {"intermediate_size": 129}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"mlp_only_layers": [0]}),
        ("qwen2_moe", {}),
    ],
)
def test_parts_of_all_ranks_make_up_the_weights(family: str, config: dict[str, object], tmp_path: Path) -> None:
    """Columns, rows and experts side by side are the checkpoint's; the rest, routers too, is whole on each; a summed bias is on
    rank 0 alone."""
    check_parts(*loaded(make_checkpoint(family, tmp_path / family, **config)))


def test_experts_stored_as_one_tensor_are_divided(tmp_path: Path) -> None:
    """Checkpoints have a tensor for each expert, or one with all experts of a layer."""
    path = make_checkpoint("mixtral", tmp_path / "mixtral")
    expected = loaded(path)
    AutoModelForCausalLM.from_pretrained(path).save_pretrained(path, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(path / "model.safetensors")
    found = loaded(path)
    check_parts(*found)
    assert all(torch.equal(found[1][1][name], weight) for name, weight in expected[1][1].items())


def test_quantized_experts_are_divided(tmp_path: Path) -> None:
    """Each rank dequantizes those of its own experts."""
    path = stored_so(make_checkpoint("qwen3_moe", tmp_path / "source"), tmp_path / "stored", fp8_blocks((32, 32)))
    check_parts(*loaded(path))


@pytest.mark.parametrize(
    ("family", "size", "config", "said"),
    [
        ("llama", 3, {}, "3 ranks do not divide the model's num_attention_heads of 4; use 1, 2, 4"),
        ("llama", 4, {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96}, "4 ranks neither divide the"),
        ("llama", 2, {"intermediate_size": 129}, "2 ranks do not divide the model's intermediate_size of 129"),
        ("phi3", 2, {}, "layers.*.self_attn.qkv_proj, which transformers divides as 'colwise_gather_output'"),
        ("mixtral", 2, {"num_local_experts": 5}, "2 ranks do not divide the model's 5 experts; use 1, 5"),
        ("qwen3_moe", 4, {"num_local_experts": 6}, "4 ranks do not divide the model's 6 experts; use 1, 2, 3, 6"),
        ("phimoe", 2, {}, "transformers' plan does not say how to divide model.layers.0.self_attn.q_proj.weight"),
        ("gemma4_text", 2, {}, "the model's layers differ in the sizes of their heads"),
        ("gpt2", 2, {}, "transformers has no tensor-parallel plan for GPT2LMHeadModel; serve it with one rank"),
        ("gpt_neox", 2, {}, "GPTNeoXForCausalLM does not divide layers.*.attention.query_key_value"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(
    family: str, size: int, config: dict[str, object], said: str, tmp_path: Path
) -> None:
    """With both values, or the module at fault."""
    assert said in refusal(make_checkpoint(family, tmp_path / family, **config), size)


def test_groups_of_integers_are_not_cut(tmp_path: Path) -> None:
    """A part of the inputs begins where a group does, or is refused with both values."""
    found = open_checkpoint(make_checkpoint("llama", tmp_path / "llama"))
    _, _, shard = sharded(found, model_class(found), 1, 2)
    weight = torch.randn(64, 128)
    half = shard.cut("model.layers.0.mlp.down_proj.weight", quantized(weight, 8, 32))
    assert torch.equal(half.dequantized(), quantized(weight, 8, 32).dequantized()[:, 64:])
    whole = shard.cut("model.layers.0.mlp.down_proj.weight", quantized(weight, 8, 128))
    assert torch.equal(whole.dequantized(), quantized(weight, 8, 128).dequantized()[:, 64:])
    with pytest.raises(ConfigError, match="quantized in groups of 32, and a rank's part of its 96 inputs are 48"):
        shard.cut("model.layers.0.mlp.down_proj.weight", quantized(weight[:, :96], 8, 32))
