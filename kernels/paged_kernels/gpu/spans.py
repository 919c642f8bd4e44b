"""Which keys a token sees, as kernels know it: all, those of a sliding window, or those of its chunk."""

from typing import NamedTuple

import triton
import triton.language as tl

from paged_kernels.backend import AttentionRule

ALL, WINDOW, CHUNK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Span(NamedTuple):
    """`kind`: ALL, WINDOW or CHUNK, a constant of kernels. `size`: tokens of a window or a chunk."""

    kind: int
    size: int


def span_of(rule: AttentionRule) -> Span:
    """That of a layer."""
    kind = ALL if rule.most_keys is None else WINDOW if rule.chunk is None else CHUNK
    return Span(int(kind.value), rule.most_keys or 0)


@triton.jit
def first_key(positions, span, SPAN: tl.constexpr):
    """The first key that tokens at `positions`, a number or a tensor, see. Not for ALL."""
    if SPAN == WINDOW:
        return tl.maximum(positions - span + 1, 0)
    return positions // span * span
