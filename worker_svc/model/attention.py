"""Bridge from transformers to Quire's kernels: one attention function for all models, found through AttentionInterface.

A model's attention modules refer to an `Attention` object (`attach`) that handles the calls: the probe
records them, and the paged one writes keys and values into blocks and attends over them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from paged_kernels.backend import AttentionBatch, AttentionRule, CacheShape, KernelBackend, written_dtype
from worker_svc.model import latent, masks
from worker_svc.model.cache.cache_groups import CacheGroups
from worker_svc.model.cache.layer_cache import LayerCache, PoolLayers, of_part

NAME = "quire_paged"
_SLOT = "quire_attention"
# Options a call may carry: Quire honours them or they do not change the result of attention.
_KNOWN = {
    "scaling", "dropout", "position_ids", "sliding_window", "softcap", "s_aux", "is_causal", "cache_position", "use_cache",
    "output_attentions", "position_embeddings", "output_router_logits", "output_hidden_states", "return_dict", "layer_idx",
    "logits_to_keep",
}  # fmt: skip


class Attention(Protocol):
    """Handler of attention calls."""

    def call(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """`query` [1, heads, T, d], `key` and `value` [1, kv_heads, T, d]; returns [1, T, heads, d]."""
        ...


def _forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    call, maps = getattr(module, _SLOT).call, latent.maps_of(module)
    if maps is None:
        return call(module, query, key, value, attention_mask, options), None
    return maps.results(call(module, maps.queries(query), key, value, attention_mask, options)), None


def register() -> str:
    """Register the attention function with transformers. Returns the name to load models with. Idempotent.

    No mask function is registered while a model serves: with even an empty one, transformers would look for
    packed sequences in every pass, which synchronises with the device. `masks.described` registers one for
    the duration of a probe.
    """
    AttentionInterface.register(NAME, _forward)
    return NAME


def attach(model: nn.Module, attention: Attention) -> None:
    """Route all attention calls of `model` to `attention`."""
    for module in model.modules():
        setattr(module, _SLOT, attention)


def _rule(
    options: dict[str, Any],
    head_dim: int,
    window: int | None,
    sinks: torch.Tensor | None,
    chunk: int | None,
) -> AttentionRule:
    scale = options.get("scaling")
    return AttentionRule(head_dim**-0.5 if scale is None else scale, window, options.get("softcap"), sinks, chunk)


def _sinks(options: dict[str, Any]) -> torch.Tensor | None:
    """Those of a call in the form of `AttentionRule`, in memory of their own."""
    sinks = options.get("s_aux")
    return None if sinks is None else sinks.detach().float().contiguous()


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One attention call as a probe saw it. `problem`: why it cannot be served; empty if it can.

    `head_dim`: elements of a cached key or value; if the model's keys and values differ, of the wider. `source`: the layer
    before it that cached the same keys and values (Gemma 3n and 4); None if they are the layer's own.
    """

    layer: int
    module: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rule: AttentionRule
    problem: str
    source: int | None = None

    @property
    def window(self) -> int | None:
        """The most tokens that a token sees, by a sliding window or in its chunk; None = unlimited."""
        return self.rule.most_keys


class ProbeAttention:
    """Records calls. Returns zeros of the right shape."""

    def __init__(self, num_positions: int) -> None:
        self.calls: list[LayerCall] = []
        self._num_positions = num_positions
        self._given: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def call(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """See Attention."""
        seen = masks.kind_of(mask)
        problem = _problem(module, options) or _shape_problem(query, key, value) or _sinks_problem(query, options)
        problem = problem or self._mask_problem(seen, options)
        layer = getattr(module, "layer_idx", None)
        layer = -1 if layer is None else int(layer)
        window = None if seen.chunk else _window(options, seen)
        rule = _rule(options, key.shape[3], window, _sinks(options), seen.chunk)
        kind = type(module).__name__
        head_dim = max(key.shape[3], value.shape[3])
        source = next((one for one, *pair in self._given if pair[0] is key and pair[1] is value), None)
        self._given.append((layer, key, value))
        self.calls.append(LayerCall(layer, kind, query.shape[1], key.shape[1], head_dim, rule, problem, source))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def _mask_problem(self, seen: masks.MaskKind, options: dict[str, Any]) -> str:
        if seen.problem:
            return f"uses {seen.problem}, which is not supported"
        window = _window(options, seen)
        if self._in_force(window) != seen.window:
            return f"passes sliding_window={window} to attention, but its mask has {seen}"
        return ""

    def _in_force(self, window: int | None) -> int | None:
        """The window, or None if it covers the longest sequence."""
        return None if window is None or window >= self._num_positions else window


def _window(options: dict[str, Any], seen: masks.MaskKind) -> int | None:
    """The window given by the call, else by its mask."""
    given: int | None = options.get("sliding_window")
    return seen.window if given is None else given


@contextmanager
def probing(model: nn.Module, num_positions: int) -> Iterator[list[LayerCall]]:
    """Record the attention calls of `model` inside the block, for sequences of up to `num_positions` tokens."""
    recorder = ProbeAttention(num_positions)
    attach(model, recorder)
    with masks.described(NAME, num_positions):
        yield recorder.calls


def _problem(module: nn.Module, options: dict[str, Any]) -> str:
    unknown = sorted(
        name for name, given in options.items() if name not in _KNOWN and given is not None and given is not False
    )
    if unknown:
        return f"passes {', '.join(unknown)} to attention, which is not supported"
    if getattr(module, "is_causal", True) is False or options.get("is_causal") is False:
        return "is not causal"
    return ""


def _shape_problem(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
    if key.shape[:3] != value.shape[:3]:
        return f"has keys {tuple(key.shape)} and values {tuple(value.shape)} of different shapes"
    if query.shape[1] % key.shape[1] or query.shape[3] != key.shape[3] or query.shape[2] != key.shape[2]:
        return f"has queries {tuple(query.shape)} that do not fit its keys {tuple(key.shape)}"
    return ""


def _sinks_problem(query: torch.Tensor, options: dict[str, Any]) -> str:
    sinks = options.get("s_aux")
    if sinks is None or sinks.shape == (query.shape[1],):
        return ""
    return f"has {query.shape[1]} query heads and attention sinks of shape {tuple(sinks.shape)}"


class PagedAttention:
    """Attention over the paged cache. Call `begin` before each forward pass.

    `caches`: by layer, where its keys and values are in `pool`, each for an equal share of its kv heads, in order.
    """

    def __init__(self, backend: KernelBackend, pool: torch.Tensor, caches: Mapping[int, Sequence[LayerCache]]) -> None:
        self._backend, self._pool, self._caches = backend, pool, caches
        self._batches: Sequence[AttentionBatch] = ()
        self._of_parts: dict[tuple[int, int, int], AttentionBatch] = {}

    def begin(self, batches: Sequence[AttentionBatch]) -> None:
        """Set the tokens of the next forward pass, for each cache group."""
        self._batches, self._of_parts = batches, {}

    def call(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """See Attention. Writes keys and values first."""
        caches = self._caches[module.layer_idx]
        shares = zip(*(each.chunk(len(caches), 1) for each in (query, key, value)), caches, strict=True)
        found = [self._share(*share, options) for share in shares]
        return found[0] if len(found) == 1 else torch.cat(found, 2)

    def _share(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        own: LayerCache,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Attention of some kv heads and of their queries."""
        cache, batch = own.part_of(self._pool), self._batch(own)
        if own.writes:
            written = written_dtype(cache.dtype)
            keys, values = (_rows(each, own.shape.head_dim).to(written) for each in (key, value))
            self._backend.write_kv(keys, values, cache, batch.slots, own.shape)
        rule = _rule(options, query.shape[3], own.rule.sliding_window, own.rule.sinks, own.rule.chunk)
        found = self._backend.paged_attention(_rows(query, own.shape.head_dim), cache, batch, own.shape, rule)
        return found[None, ..., : value.shape[3]]

    def _batch(self, own: LayerCache) -> AttentionBatch:
        """The tokens of the pass and their places in the cache."""
        batch, spot = self._batches[own.place.group], own.spot
        if spot.num_parts == 1:
            return batch
        key = (own.place.group, spot.part, spot.num_parts)
        if key not in self._of_parts:
            self._of_parts[key] = of_part(batch, spot.part, spot.num_parts, own.shape.block_size)
        return self._of_parts[key]


def caches_of(
    calls: Sequence[LayerCall], shapes: Mapping[int, CacheShape], layers: PoolLayers, groups: CacheGroups
) -> dict[int, list[LayerCache]]:
    """Of each layer. `shapes`: of the layers with keys and values of their own; `groups`: of the pool's layers."""
    places = groups.places

    def of_call(call: LayerCall) -> list[LayerCache]:
        source = call.layer if call.source is None else call.source
        spots = layers.spots[source]
        shape = replace(shapes[source], num_kv_heads=shapes[source].num_kv_heads // len(spots))
        return [
            LayerCache(places[spot.pool_layer], shape, rule, call.source is None, spot)
            for spot, rule in zip(spots, _rules(call.rule, len(spots)), strict=True)
        ]

    return {call.layer: of_call(call) for call in calls}


def _rules(rule: AttentionRule, count: int) -> list[AttentionRule]:
    """The rule of each share of the heads."""
    if rule.sinks is None:
        return [rule] * count
    return [replace(rule, sinks=sinks.contiguous()) for sinks in rule.sinks.chunk(count)]


def _rows(x: torch.Tensor, width: int) -> torch.Tensor:
    """[1, heads, T, d] to [T, heads, width], contiguous, as the projections produced it; filled up with zeros."""
    rows = x[0].transpose(0, 1)
    return rows.contiguous() if x.shape[3] == width else torch.nn.functional.pad(rows, (0, width - x.shape[3]))
