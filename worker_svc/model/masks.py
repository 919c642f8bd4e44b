"""Reads which tokens a layer may see from the mask that its model requests from transformers.

Serving never builds a mask: block tables, positions and a window carry the same information, and a dense mask
would cost T squared. Only during a probe does transformers (`transformers.masking_utils`) get a mask
function. It returns a small tensor that carries the meaning of the mask, which is read where the tensor
reaches an attention call.
"""

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionMaskInterface

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_KIND = "quire_mask_kind"
_NUM_FIRST, _NUM_BETWEEN, _AHEAD = 16, 6, 64
_GOLDEN = (5**0.5 - 1) / 2
_ONE_PROBE = threading.Lock()
# Number of positions to evaluate masks for; 0 = no probe is running.
_PROBED: ContextVar[int] = ContextVar("probed_positions", default=0)


@dataclass(frozen=True, slots=True)
class MaskKind:
    """Meaning of a mask.

    `window`: tokens that a query sees, itself included; None = all up to itself. `chunk`: size of the chunks that positions
    are divided into; a query sees its own up to itself; None = no chunks. `problem`: unsupported kind.
    """

    window: int | None = None
    problem: str = ""
    chunk: int | None = None

    def __str__(self) -> str:
        return f"a window of {self.window}" if self.chunk is None else f"chunks of {self.chunk}"


@contextmanager
def described(attention: str, num_positions: int) -> Iterator[None]:
    """In this thread, attach meanings to masks for the named attention, for up to `num_positions` tokens.

    One probe at a time per process: transformers has one table of mask functions.
    """
    with _ONE_PROBE:
        AttentionMaskInterface.register(attention, answer)
        token = _PROBED.set(num_positions)
        try:
            yield
        finally:
            _PROBED.reset(token)
            AttentionMaskInterface._global_mapping.pop(attention, None)


def answer(
    *_args: Any,
    mask_function: MaskFunction | None = None,
    q_length: int = 1,
    kv_length: int = 1,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str | None = None,
    **_options: Any,
) -> torch.Tensor | None:
    """Mask function for transformers: None, or inside `described` a boolean causal mask that `kind_of` can read."""
    num_positions = _PROBED.get()
    if not num_positions:
        return None
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=device).tril()
    kind = read(mask_function, num_positions) if attention_mask is None else MaskKind(problem="a mask for padding")
    setattr(mask, _KIND, kind)
    return mask


def kind_of(mask: torch.Tensor | None) -> MaskKind:
    """Meaning of a mask that reached an attention call; None means causal, as in torch's own attention."""
    return MaskKind() if mask is None else getattr(mask, _KIND, MaskKind(problem="a mask of its own"))


def read(function: MaskFunction | None, num_positions: int) -> MaskKind:
    """Meaning of a mask function, from the tokens that some queries see. A window or a chunk of all positions is none."""
    if function is None:
        return MaskKind(problem="a mask that this transformers release does not describe")
    try:
        counts = _counts(function, num_positions)
        window = max(counts.values())
        if all(count == min(query + 1, window) for query, count in counts.items()):
            return MaskKind(None if window == num_positions else window)
        return _chunks(function, num_positions, counts)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return MaskKind(problem="a mask that depends on more than positions")


def _counts(function: MaskFunction, num_positions: int) -> dict[int, int]:
    """Number of tokens seen, for sample queries.

    The samples are the first queries, the last, some unevenly spaced, and those around the end of a window.
    """
    spread = (int(num_positions * (_GOLDEN * i % 1)) for i in range(_NUM_BETWEEN))
    queries = {*range(min(num_positions, _NUM_FIRST)), *spread, num_positions - 1}
    counts = {query: _num_seen(function, query, num_positions) for query in queries}
    window = max(counts.values())
    around = {window - 1, window, window + 1} & set(range(num_positions))
    return counts | {query: _num_seen(function, query, num_positions) for query in around}


def _num_seen(function: MaskFunction, query: int, num_positions: int) -> int:
    """Number of tokens a query sees; 0 if they are not consecutive up to itself. Keys far ahead of it are not checked."""
    num_keys = min(num_positions, 2 * query + _AHEAD)
    zero, keys = torch.tensor(0), torch.arange(num_keys)
    seen = torch.as_tensor(function(zero, zero, torch.tensor(query), keys)).expand(num_keys)
    count = int(seen.sum())
    return count if bool(seen[max(0, query + 1 - count) : query + 1].sum() == count) else 0


def _chunks(function: MaskFunction, num_positions: int, counts: dict[int, int]) -> MaskKind:
    """A mask of chunks, if it is one: the first query that does not see all before it begins the second chunk.

    `counts`: tokens seen by sample queries. Those around the borders of some chunks are checked too.
    """
    queries = range(num_positions)
    size = bisect_left(queries, True, key=lambda query: _num_seen(function, query, num_positions) <= query)
    borders = {size, 2 * size, 3 * size, (num_positions - 1) // size * size} if size else set()
    around = {border + near for border in borders for near in (-1, 0, 1)} & set(queries)
    counts = counts | {query: _num_seen(function, query, num_positions) for query in around}
    if size and all(count == query % size + 1 for query, count in counts.items()):
        return MaskKind(chunk=size)
    return MaskKind(problem="a mask that is neither causal nor a sliding window nor of chunks")
