"""Which part of each weight a rank loads, and which models are refused before any weight is read."""

from pathlib import Path

import pytest
import torch

from paged_kernels.quantized import quantized
from svc_common.errors import ConfigError
from tests.support.checkpoints import make_checkpoint
from worker_svc.model.checkpoint import load_model, model_class, open_checkpoint
from worker_svc.model.sharding.shards import sharded


def refusal(path: Path, size: int) -> str:
    found = open_checkpoint(path)
    with pytest.raises(ConfigError) as caught:
        sharded(found, model_class(found), 0, size)
    assert caught.value.reason == "TENSOR_PARALLEL"
    return caught.value.message


def test_parts_of_all_ranks_make_up_the_weights(tmp_path: Path) -> None:
    """Columns and rows side by side are the checkpoint's; the rest is whole on each; a summed bias is on rank 0 alone."""
    path = make_checkpoint("llama", tmp_path / "llama", attention_bias=True)
    found = open_checkpoint(path)
    cls = model_class(found)
    whole = load_model(found, cls, torch.float32, "eager", lambda _done: None)[0].state_dict()
    parts = []
    for rank in range(2):
        own, shard = sharded(found, cls, rank, 2)
        parts.append(load_model(own, cls, torch.float32, "eager", lambda _done: None)[0].state_dict())
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
    ("family", "size", "config", "said"),
    [
        ("llama", 3, {}, "3 ranks do not divide the model's num_attention_heads of 4; use 1, 2, 4"),
        ("llama", 4, {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96}, "4 ranks neither divide the"),
        ("llama", 2, {"intermediate_size": 129}, "2 ranks do not divide the model's intermediate_size of 129"),
        ("phi3", 2, {}, "layers.*.self_attn.qkv_proj, which transformers divides as 'colwise_gather_output'"),
        ("mixtral", 2, {}, "layers.*.mlp.experts.gate_up_proj, which transformers divides as 'packed_colwise'"),
        ("gpt2", 2, {}, "has no number intermediate_size to divide"),
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
    _, shard = sharded(found, model_class(found), 1, 2)
    weight = torch.randn(64, 128)
    half = shard.cut("model.layers.0.mlp.down_proj.weight", quantized(weight, 8, 32))
    assert torch.equal(half.dequantized(), quantized(weight, 8, 32).dequantized()[:, 64:])
    whole = shard.cut("model.layers.0.mlp.down_proj.weight", quantized(weight, 8, 128))
    assert torch.equal(whole.dequantized(), quantized(weight, 8, 128).dequantized()[:, 64:])
    with pytest.raises(ConfigError, match="quantized in groups of 32, and a rank's part of its 96 inputs are 48"):
        shard.cut("model.layers.0.mlp.down_proj.weight", quantized(weight[:, :96], 8, 32))
