"""Latent attention (MLA): layers whose keys and values are linear in one narrow vector per token, which the cache keeps.

transformers' modules expand that vector (`expand_kv`) into a key and a value for each head. Here queries are mapped into its
space instead, and results out of it: the absorbed form of DeepSeek-V2 (arXiv 2405.04434, section 2.1.2). To the cache and to
kernels such a layer has one kv head: its key is the latent and the rotary part, its value the latent.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_NAME = "quire_latent"
_TRIED = 4
# Of the largest element: float32 sums of up to a thousand products, and roundings of bfloat16.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}


class HeadMaps(nn.Module):
    """A matrix for each head: rows [T, heads * from] to rows [T, heads * to]. `weight`: [heads, from, to]."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.contiguous(), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """See the class."""
        heads, width, _ = self.weight.shape
        return torch.bmm(rows.view(-1, heads, width).transpose(0, 1), self.weight).transpose(0, 1).flatten(1)


class LatentMaps(nn.Module):
    """How queries enter the space of latents, and results leave it, in one layer.

    `to_latent`: from a query's part without positions; `from_latent`: to a head's value.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """`keys`: [heads, latent, part without positions]; `values`: [heads, latent, value]."""
        super().__init__()
        self.to_latent, self.from_latent = HeadMaps(keys.transpose(1, 2)), HeadMaps(values)

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """[1, heads, T, part without positions + rotary part] to [1, heads, T, latent + rotary part]."""
        heads, width, latent = self.to_latent.weight.shape
        rows = query[0].transpose(0, 1)
        mapped = self.to_latent(rows[..., :width].reshape(-1, heads * width)).view(-1, heads, latent)
        return torch.cat([mapped, rows[..., width:]], -1).transpose(0, 1)[None]

    def results(self, found: torch.Tensor) -> torch.Tensor:
        """[1, T, heads, latent] to [1, T, heads, value]."""
        heads, _, width = self.from_latent.weight.shape
        return self.from_latent(found[0].flatten(1)).view(1, -1, heads, width)


class _Absorbed(nn.Module):
    """Stands for a module that is part of `LatentMaps` now."""

    def forward(self, *_given: Any, **_options: Any) -> torch.Tensor:
        """Raise RuntimeError."""
        raise RuntimeError("this module's weight is part of the latent maps: set --no-latent-cache")


def maps_of(module: nn.Module) -> LatentMaps | None:
    """The maps of an attention module, None if it has none."""
    return getattr(module, _NAME, None)


@torch.inference_mode()
def absorb(model: nn.Module) -> int:
    """Have all latent attention modules keep latents. Returns their number.

    A module that expands latents in another way stays as it is, with keys and values for each head.
    """
    found = [(module, maps) for module in model.modules() if (maps := _found(module)) is not None]
    for module, (maps, used) in found:
        module.add_module(_NAME, maps)
        module.expand_kv = _joined  # type: ignore[assignment]
        for name in used:
            setattr(module, name, _Absorbed())
    return len(found)


def _joined(latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The key and the value that the cache keeps, in place of `expand_kv`."""
    return torch.cat([latent, rotary], -1), latent


def _found(module: nn.Module) -> tuple[LatentMaps, list[str]] | None:
    """A module's maps, and its children that only they need."""
    sizes = [getattr(module, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim")]
    if not hasattr(module, "expand_kv") or not all(sizes):
        return None
    latent, rotary = map(int, sizes)  # type: ignore[arg-type]
    like = next(module.parameters())
    with _children_called(module) as used:
        maps = _read(module, like, latent, rotary)
    return None if maps is None else (maps, used)


def _read(module: nn.Module, like: torch.Tensor, latent: int, rotary: int) -> LatentMaps | None:
    """The maps, by what `expand_kv` makes of unit vectors; None if it is not what they compute."""
    keys, values = _expanded(
        module, torch.eye(latent, out=like.new_empty(latent, latent)), like.new_zeros(latent, rotary)
    )
    maps = LatentMaps(keys[..., : keys.shape[-1] - rotary], values)
    return maps if like.is_meta or _is_right(module, maps, like, latent, rotary) else None


def _expanded(module: nn.Module, latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [heads, T, d] and values [heads, T, d] of latents [T, latent] with rotary parts [T, rotary]."""
    keys, values = module.expand_kv(latent[None, None], rotary[None, None])  # type: ignore[operator]
    return keys[0], values[0]


def _is_right(module: nn.Module, maps: LatentMaps, like: torch.Tensor, latent: int, rotary: int) -> bool:
    """Whether scores and values by the maps are those of expanded keys and values."""
    draws = torch.Generator().manual_seed(0)
    given = torch.randn(_TRIED, latent + rotary, generator=draws).to(like)
    keys, values = _expanded(module, given[:, :latent], given[:, latent:])
    query = torch.randn(1, *keys.shape, generator=draws).to(like)
    kept, _ = _joined(given[None, None, :, :latent], given[None, None, :, latent:])
    absorbed = maps.queries(query).float() @ kept.float().transpose(-1, -2)
    found = maps.results(given[None, :, None, :latent].expand(-1, -1, keys.shape[0], -1))
    return _is_close(absorbed, query.float() @ keys.float().transpose(-1, -2), like.dtype) and _is_close(
        found, values.transpose(0, 1)[None], like.dtype
    )


def _is_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    most = _TOLERANCE[dtype] * float(expected.abs().max())
    return found.shape == expected.shape and float((found.float() - expected.float()).abs().max()) <= most


@contextmanager
def _children_called(module: nn.Module) -> Iterator[list[str]]:
    """Inside the block, collect names of the module's children that are called."""
    called: list[str] = []
    handles = [
        child.register_forward_pre_hook(lambda *_, name=name: called.append(name) if name not in called else None)
        for name, child in module.named_children()
    ]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()
