"""Bridge from transformers to Quire's kernels: one attention function for all models, found through AttentionInterface.

A model's attention modules refer to an `Attention` object (`attach`) that handles the calls: the probe
records them, and the paged one writes keys and values into blocks and attends over them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from paged_kernels.backend import AttentionBatch, AttentionRule, CacheShape, KernelBackend, written_dtype
from worker_svc.model import masks
from worker_svc.model.cache.cache_groups import LayerPlace

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
    return getattr(module, _SLOT).call(module, query, key, value, attention_mask, options), None


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

    `head_dim`: elements of a cached key or value; if the model's keys and values differ, of the wider.
    """

    layer: int
    module: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rule: AttentionRule
    problem: str

    @property
    def window(self) -> int | None:
        """The most tokens that a token sees, by a sliding window or in its chunk; None = unlimited."""
        return self.rule.most_keys


class ProbeAttention:
    """Records calls. Returns zeros of the right shape."""

    def __init__(self, num_positions: int) -> None:
        self.calls: list[LayerCall] = []
        self._num_positions = num_positions

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
        self.calls.append(LayerCall(layer, kind, query.shape[1], key.shape[1], head_dim, rule, problem))
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

    `rules`: per layer, from a probe, of which windows, chunks and sinks are used. `places`: of these layers in `pool`.
    """

    def __init__(
        self,
        backend: KernelBackend,
        shape: CacheShape,
        pool: torch.Tensor,
        rules: Mapping[int, AttentionRule],
        places: Mapping[int, LayerPlace],
    ) -> None:
        self._backend, self._shape, self._pool, self._rules, self._places = backend, shape, pool, rules, places
        self._batches: Sequence[AttentionBatch] = ()

    def begin(self, batches: Sequence[AttentionBatch]) -> None:
        """Set the tokens of the next forward pass, for each cache group."""
        self._batches = batches

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
        place = self._places[module.layer_idx]
        cache, batch = self._pool[place.index], self._batches[place.group]
        written = written_dtype(cache.dtype)
        width = self._shape.head_dim
        keys, values = _rows(key, width).to(written), _rows(value, width).to(written)
        self._backend.write_kv(keys, values, cache, batch.slots, self._shape)
        probed = self._rules[module.layer_idx]
        rule = _rule(options, query.shape[3], probed.sliding_window, probed.sinks, probed.chunk)
        found = self._backend.paged_attention(_rows(query, width), cache, batch, self._shape, rule)
        return found[None, ..., : value.shape[3]]


def _rows(x: torch.Tensor, width: int) -> torch.Tensor:
    """[1, heads, T, d] to [T, heads, width], contiguous, as the projections produced it; filled up with zeros."""
    rows = x[0].transpose(0, 1)
    return rows.contiguous() if x.shape[3] == width else torch.nn.functional.pad(rows, (0, width - x.shape[3]))
