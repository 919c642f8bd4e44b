"""Converts a decoder's parts to operators.

Packs its linear modules layer by layer, so that few weights are in memory twice at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paged_kernels.backend import CacheShape
from paged_kernels.decoder import (
    Attend,
    DecoderKernels,
    Gated,
    HeadNorm,
    Linear,
    Norm,
    Operator,
    PackedWeights,
    Program,
    Reduce,
    RotateAndStore,
    Rows,
)
from paged_kernels.host_memory import CleanFilePages
from paged_kernels.ranks import RankSums
from worker_svc.model.attention import LayerCall
from worker_svc.model.cache.cache_groups import LayerPlace
from worker_svc.model.fused.behaviour import NormForm
from worker_svc.model.fused.packed_linear import (
    PackedLinear,
    WeightOf,
    merged,
    packed_together,
    part,
    plain_weight,
    put_in_place,
    views,
)
from worker_svc.model.fused.parts import DecoderParts, LayerParts, Norms
from worker_svc.model.fused.positions import Angles, Entry


def program_of(
    parts: DecoderParts,
    entry: Entry,
    calls: Sequence[LayerCall],
    places: Mapping[int, LayerPlace],
    shape: CacheShape,
    kernels: DecoderKernels,
    weight_of: WeightOf = plain_weight,
    pages: CleanFilePages = CleanFilePages(),  # noqa: B008  (frozen)
    sums: RankSums | None = None,
) -> Program:
    """The operators of the decoder, or of a stage's layers.

    `calls`: one per layer in order, from a probe. `places`: of these layers in the cache. `pages`: of mapped
    checkpoints; those of packed weights are dropped. `sums`: over the ranks of a group,
    where attention and gated part are a part of a sum.
    """
    packing = _Packing(kernels, weight_of, pages)
    operators: list[Operator] = []
    angles_of = entry.angles[parts.first_layer :]
    for number, (layer, call) in enumerate(zip(parts.layers, calls, strict=True)):
        operators += _layer(places[call.layer], layer, angles_of[number], call, packing, sums)
    if parts.last_norm is not None:
        operators.append(_norm(Rows.STREAM, Rows.STREAM, parts.last_norm))
    heads, gated = _widths(operators)
    width = len(parts.norm.weight)
    attended = calls[0].num_heads * shape.head_dim
    widths = {Rows.STREAM: width, Rows.NORMED: width, Rows.HEADS: heads, Rows.ATTENDED: attended, Rows.GATED: gated}
    return Program(operators, widths, calls[0].num_heads, shape, parts.norm.weight.dtype)


def _widths(operators: Sequence[Operator]) -> tuple[int, int]:
    heads = next(op.weights.columns for op in operators if isinstance(op, Linear) and op.target is Rows.HEADS)
    gated = max(op.gate.columns for op in operators if isinstance(op, Gated))
    return heads, gated


def _layer(
    place: LayerPlace, layer: LayerParts, angles: Angles, call: LayerCall, packing: "_Packing", sums: RankSums | None
) -> Iterator[Operator]:
    yield _norm(Rows.STREAM, Rows.NORMED, layer.around_attention.before)
    yield Linear(Rows.NORMED, Rows.HEADS, packing.packed(layer, layer.projections))
    yield RotateAndStore(place.index, angles.cosines, angles.sines, _head_norm(layer), place.group)
    yield Attend(place.index, call.rule, place.group)
    yield from _joining(Rows.ATTENDED, packing.packed(layer, ("o_proj",)), layer.around_attention, sums)
    yield _norm(Rows.STREAM, Rows.NORMED, layer.around_mlp.before)
    gates = packing.packed(layer, layer.gates)
    half = gates.columns // 2
    yield Gated(Rows.NORMED, Rows.GATED, part(gates, 0, half), part(gates, half, half), layer.activation)
    yield from _joining(Rows.GATED, packing.packed(layer, ("down_proj",)), layer.around_mlp, sums)


def _joining(source: Rows, weights: PackedWeights, norms: Norms, sums: RankSums | None) -> Iterator[Operator]:
    """Add a part's result to the stream, summed over ranks, and through a norm where there is one."""
    if norms.after is None and sums is None:
        yield Linear(source, Rows.STREAM, weights, adds=True)
        return
    yield Linear(source, Rows.NORMED, weights)
    if sums is not None:
        target = Rows.STREAM if norms.after is None else Rows.NORMED
        yield Reduce(Rows.NORMED, target, sums, adds=norms.after is None)
    if norms.after is not None:
        yield _norm(Rows.NORMED, Rows.STREAM, norms.after, adds=True)


def _norm(source: Rows, target: Rows, form: NormForm, *, adds: bool = False) -> Norm:
    return Norm(source, target, form.weight, form.eps, form.one_plus, adds)


def _head_norm(layer: LayerParts) -> HeadNorm | None:
    if not layer.head_norms:
        return None
    queries, keys = layer.head_norms
    return HeadNorm(queries.weight, keys.weight, queries.eps, queries.one_plus)


@dataclass(frozen=True, slots=True)
class _Packing:
    """Packs a layer's modules with these kernels."""

    kernels: DecoderKernels
    weight_of: WeightOf
    pages: CleanFilePages

    def packed(self, layer: LayerParts, names: Sequence[str]) -> PackedWeights:
        """The named modules' weights, merged. Modules that are not views of merged weights yet are replaced by such."""
        modules = [layer.linear(name) for name in names]
        linears = [module for module in modules if isinstance(module, nn.Linear)]
        if not linears:
            return packed_together(modules)
        whole = merged(self.kernels, linears, self.weight_of)
        made = views(self.kernels, whole, [linear.out_features for linear in linears])
        for name, linear, view in zip(names, linears, made, strict=True):
            owner = layer.mlp if getattr(layer.mlp, name, None) is linear else layer.attention
            put_in_place(owner, name, view)
            self.pages.drop(linear.weight)
        return whole


def packed_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Memory of all packed weights and their biases."""
    found = [tensor for weights in _packed(model) for tensor in (weights.data, weights.bias)]
    return [tensor for tensor in found if tensor is not None]


def quantized_bytes(model: nn.Module) -> int:
    """Bytes of the packed weights that are quantized."""
    return sum(weights.num_bytes for weights in _packed(model) if weights.form.stored != "plain")


def _packed(model: nn.Module) -> list[PackedWeights]:
    return [module.weights for module in model.modules() if isinstance(module, PackedLinear)]
