"""Records the first layer's input and the position angles of every layer, for all positions that will be served."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_PIECE = 2_048


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosines and sines, both [positions, rotated elements], in the model's dtype."""

    cosines: torch.Tensor
    sines: torch.Tensor


@dataclass(slots=True)
class _Seen:
    streams: list[torch.Tensor] = field(default_factory=list)
    angles: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """`scale`: factor of embeddings. `angles`: per layer; layers with equal angles share them."""

    scale: float
    angles: tuple[Angles, ...]


def enter(decoder: nn.Module, embedding: nn.Embedding | None, num_positions: int) -> Entry | None:
    """Run the decoder without its layers.

    None if a layer gets positions in another way, or the stream is not an embedding. `embedding`: None in a stage that
    gets the stream from another one; its scale is 1.
    """
    layers: list[nn.Module] = list(decoder.layers)  # type: ignore[arg-type]
    token = 0 if embedding is None else embedding.num_embeddings // 2
    seen, device = _Seen(), next(decoder.parameters()).device
    with _bypassed(layers, seen), torch.inference_mode():
        for begin in range(0, num_positions, _PIECE):
            places = torch.arange(begin, min(begin + _PIECE, num_positions), device=device)[None]
            decoder(input_ids=torch.full_like(places, token), position_ids=places, use_cache=False)
    if len(seen.angles) != len(layers):
        return None
    if embedding is None:
        return Entry(1.0, _joined(seen.angles))
    with torch.inference_mode():
        embedded = embedding(torch.tensor([[token]], device=device))[0, 0]
    scale = scale_of(embedded, seen.streams[0][0, 0])
    return None if scale is None else Entry(scale, _joined(seen.angles))


def scale_of(embedded: torch.Tensor, stream: torch.Tensor) -> float | None:
    """The factor, rounded to their dtype, that makes `stream` of `embedded`; None if there is none."""
    largest = int(embedded.abs().argmax())
    scale = round(float(stream[largest] / embedded[largest]), 6)
    for candidate in (1.0, float(torch.tensor(scale).to(stream.dtype)), scale):
        if torch.equal(embedded * torch.tensor(candidate, dtype=stream.dtype), stream):
            return candidate
    return None


def _joined(seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]]) -> tuple[Angles, ...]:
    """Layers that received the same tensors share one result."""
    made: dict[int, Angles] = {}
    for pieces in seen.values():
        key = id(pieces[0][0])
        if key not in made:
            made[key] = Angles(*(torch.cat(of_all, dim=1)[0].contiguous() for of_all in zip(*pieces, strict=True)))
    return tuple(made[id(pieces[0][0])] for pieces in seen.values())


@contextmanager
def _bypassed(layers: list[nn.Module], seen: _Seen) -> Iterator[None]:
    """Make layers return their input and record the angles they receive."""

    def bypass(number: int) -> Any:
        def forward(stream: torch.Tensor, *_args: Any, **told: Any) -> torch.Tensor:
            angles = told.get("position_embeddings")
            if number == 0:
                seen.streams.append(stream)
            if isinstance(angles, tuple) and len(angles) == 2:
                seen.angles.setdefault(number, []).append(angles)
            return stream

        return forward

    for number, layer in enumerate(layers):
        layer.forward = bypass(number)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
