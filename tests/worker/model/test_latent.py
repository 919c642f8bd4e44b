"""Latent attention: what the cache keeps, and modules that are not what they seem."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.support.checkpoints import make_checkpoint
from tests.support.worker.driver import make_engine
from worker_svc.model import latent

_LATENT, _ROTARY, _HEADS = 32, 8, 4
_FAMILIES = ("deepseek_v3", "glm4_moe_lite", "mistral4")


@pytest.mark.parametrize("family", _FAMILIES)
def test_the_cache_keeps_one_head_of_latents(family, tmp_path):
    path = make_checkpoint(family, tmp_path / "model")
    absorbed, expanded = (make_engine(path, latent_cache=kept)._need_loaded() for kept in (True, False))
    assert (absorbed.shape.num_kv_heads, absorbed.shape.head_dim) == (1, _LATENT + _ROTARY)
    assert (expanded.shape.num_kv_heads, expanded.shape.head_dim) == (_HEADS, 24)
    assert absorbed.block_bytes * _HEADS * 24 == expanded.block_bytes * (_LATENT + _ROTARY)
    # The maps take the place of the weight that they are made from.
    assert absorbed.model.weight_bytes == pytest.approx(expanded.model.weight_bytes, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_maps_give_the_scores_and_values_of_expanded_keys(dtype, tmp_path):
    module = _attention(make_checkpoint("deepseek_v3", tmp_path / "model")).to(dtype)
    given = torch.randn(1, 1, 5, _LATENT + _ROTARY, dtype=dtype)
    keys, values = module.expand_kv(given[..., :_LATENT], given[..., _LATENT:])
    query = torch.randn(1, _HEADS, 3, keys.shape[-1], dtype=dtype)
    assert latent.absorb(module) == 1
    kept, of_values = module.expand_kv(given[..., :_LATENT], given[..., _LATENT:])
    assert kept.equal(given)
    maps = latent.maps_of(module)
    scores = maps.queries(query).float() @ kept.float().transpose(-1, -2)
    expected = query.float() @ keys.float().transpose(-1, -2)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05 * float(expected.abs().max())
    torch.testing.assert_close(scores, expected, rtol=0, atol=tolerance)
    found = maps.results(of_values[0][:, :, None].expand(-1, -1, _HEADS, -1))
    torch.testing.assert_close(found, values.transpose(1, 2), rtol=0, atol=1e-4 if dtype == torch.float32 else 0.1)


def test_the_module_that_expanded_is_gone(tmp_path):
    module = _attention(make_checkpoint("deepseek_v3", tmp_path / "model"))
    before = sum(p.numel() for p in module.parameters())
    latent.absorb(module)
    assert sum(p.numel() for p in module.parameters()) == before
    with pytest.raises(RuntimeError, match="--no-latent-cache"):
        module.kv_b_proj(torch.zeros(1, _LATENT))


@pytest.mark.parametrize("change", ["squared", "positions first", "a bias"])
def test_another_expansion_stays_as_it_is(change, tmp_path):
    module = _attention(make_checkpoint("deepseek_v3", tmp_path / "model"))
    whole = module.expand_kv

    def expand(vector: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = whole(vector**2 if change == "squared" else vector, rotary)
        if change == "a bias":
            return keys, values + 1.0
        return (keys.roll(_ROTARY, -1) if change == "positions first" else keys), values

    module.expand_kv = expand
    assert latent.absorb(module) == 0
    assert latent.maps_of(module) is None
    assert module.expand_kv is expand
    assert isinstance(module.kv_b_proj, nn.Linear)


def _attention(path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(path).model.layers[0].self_attn.requires_grad_(False)
