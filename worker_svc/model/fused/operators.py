"""Converts a decoder's parts to operators.

Packs its linear modules layer by layer, so that few weights are in memory twice at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from paged_kernels.backend import CacheShape
from paged_kernels.decoder import DecoderKernels, MixtureKernels
from paged_kernels.host_memory import CleanFilePages
from paged_kernels.program import (
    Attend,
    Experts,
    Gated,
    HeadNorm,
    Linear,
    Mix,
    Norm,
    Operator,
    PackedWeights,
    Program,
    Reduce,
    RotateAndStore,
    Rows,
)
from paged_kernels.ranks import RankSums
from worker_svc.model.attention import LayerCall
from worker_svc.model.cache.cache_groups import LayerPlace
from worker_svc.model.fused.behaviour import NormForm
from worker_svc.model.fused.gated_part import GatedPart
from worker_svc.model.fused.mixture_parts import MixtureParts
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
from worker_svc.model.fused.packed_mixture import PackedMixture, packed_mixture
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
    width = len(parts.norm.weight)
    widths = {Rows.STREAM: width, Rows.NORMED: width, Rows.ATTENDED: calls[0].num_heads * shape.head_dim}
    return Program(operators, widths | _widths(operators), calls[0].num_heads, shape, parts.norm.weight.dtype)


def _widths(operators: Sequence[Operator]) -> dict[Rows, int]:
    """Of the buffers that operators write only; the widest where they differ."""
    widths: dict[Rows, int] = {}
    for op in operators:
        written: list[tuple[Rows, int]] = []
        if isinstance(op, Linear) and op.target in {Rows.HEADS, Rows.SHARED, Rows.SHARED_GATE}:
            written = [(op.target, op.weights.columns)]
        elif isinstance(op, Gated):
            written = [(Rows.GATED, op.gate.columns)]
        elif isinstance(op, Experts):
            written = [(Rows.GATED, op.top_k * op.weights.inner), (Rows.PARTS, op.top_k * op.weights.width)]
        for rows, columns in written:
            widths[rows] = max(widths.get(rows, 0), columns)
    return widths


def _layer(
    place: LayerPlace, layer: LayerParts, angles: Angles, call: LayerCall, packing: "_Packing", sums: RankSums | None
) -> Iterator[Operator]:
    yield _norm(Rows.STREAM, Rows.NORMED, layer.around_attention.before)
    yield Linear(Rows.NORMED, Rows.HEADS, packing.packed(layer.attention, layer.projections))
    yield RotateAndStore(place.index, angles.cosines, angles.sines, _head_norm(layer), place.group)
    yield Attend(place.index, call.rule, place.group)
    out = packing.packed(layer.attention, ("o_proj",))
    yield from _joining(lambda target, adds: Linear(Rows.ATTENDED, target, out, adds), layer.around_attention, sums)
    yield _norm(Rows.STREAM, Rows.NORMED, layer.around_mlp.before)
    if isinstance(layer.mlp, MixtureParts):
        yield from _mixture(layer.mlp, layer.module, layer.around_mlp, packing)
        return
    yield _gated(layer.mlp, packing)
    down = packing.packed(layer.mlp.module, ("down_proj",))
    yield from _joining(lambda target, adds: Linear(Rows.GATED, target, down, adds), layer.around_mlp, sums)


def _gated(part_of: GatedPart, packing: "_Packing") -> Gated:
    gates = packing.packed(part_of.module, part_of.gates)
    half = gates.columns // 2
    return Gated(Rows.NORMED, Rows.GATED, part(gates, 0, half), part(gates, half, half), part_of.activation)


def _mixture(parts: MixtureParts, layer: nn.Module, norms: Norms, packing: "_Packing") -> Iterator[Operator]:
    shared = parts.shared
    if shared is not None:
        yield _gated(shared, packing)
        yield Linear(Rows.GATED, Rows.SHARED, packing.packed(shared.module, ("down_proj",)))
    if parts.gate_name:
        yield Linear(Rows.NORMED, Rows.SHARED_GATE, packing.packed(parts.module, (parts.gate_name,)))
    made = packing.mixture(parts, layer)
    routing, has_shared, is_gated = parts.routing, shared is not None, bool(parts.gate_name)
    yield made.route
    yield Experts(Rows.NORMED, made.weights, routing.top_k)
    yield from _joining(lambda target, adds: Mix(target, routing, adds, has_shared, is_gated), norms, None)


def _joining(of: Callable[[Rows, bool], Operator], norms: Norms, sums: RankSums | None) -> Iterator[Operator]:
    """Add a part's result to the stream, summed over ranks, and through a norm where there is one.

    `of`: the last operator of the part, by its target and whether it adds.
    """
    if norms.after is None and sums is None:
        yield of(Rows.STREAM, True)
        return
    yield of(Rows.NORMED, False)
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

    def packed(self, owner: nn.Module, names: Sequence[str]) -> PackedWeights:
        """The named modules' weights, merged. Modules that are not views of merged weights yet are replaced by such."""
        modules = [getattr(owner, name) for name in names]
        linears = [module for module in modules if isinstance(module, nn.Linear)]
        if not linears:
            return packed_together(modules)
        whole = merged(self.kernels, linears, self.weight_of)
        made = views(self.kernels, whole, [linear.out_features for linear in linears])
        for name, linear, view in zip(names, linears, made, strict=True):
            put_in_place(owner, name, view)
            self.pages.drop(linear.weight)
        return whole

    def mixture(self, parts: MixtureParts, layer: nn.Module) -> PackedMixture:
        """The mixture packed, in place of the module."""
        assert isinstance(self.kernels, MixtureKernels)
        name = next(name for name, child in layer.named_children() if child is parts.module)
        made = packed_mixture(parts, self.kernels, self.weight_of, self.pages)
        setattr(layer, name, made)
        return made


def packed_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Memory of all packed weights and their biases."""
    found = [tensor for weights in _packed(model) for tensor in (weights.data, weights.bias)]
    return [tensor for tensor in found if tensor is not None]


def quantized_bytes(model: nn.Module) -> int:
    """Bytes of the packed weights that are quantized."""
    return sum(weights.num_bytes for weights in _packed(model) if weights.form.stored != "plain")


def _packed(model: nn.Module) -> list[PackedWeights]:
    linears = [module.weights for module in model.modules() if isinstance(module, PackedLinear)]
    mixtures = [module.packed for module in model.modules() if isinstance(module, PackedMixture)]
    return [*linears, *chain.from_iterable(mixtures)]
