"""Batch invariance: measures the row counts at which a row's bits do not depend on the other rows of the batch.

Libraries choose their order of summation by the number of rows: on some processors, float32 products of
1-11 rows differ in their last bits from larger ones, and bfloat16 products of 1-2 rows do; activations may
differ at the end of a thread's share. So every distinct row-wise module of the loaded model is measured,
and `RowRule` says how to pad and split the packed row.
"""

import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn

_ANCHOR_ROWS = 64
# Row i of a probe repeats row (STRIDE * i) of the anchor, so that positions are compared as well as counts.
_STRIDE = 7
_SMALL = (*range(1, 21), 22, 24, 28, 32, 36)
# Most informative counts first: the time budget may end the run early.
_LARGE = (65, 513, 128, 33, 255, 1000, 48, 2048, 40, 64, 257, 511, 63, 384, 1536, 96, 2047, 200, 768, 256, 512, 1024)
_MULTIPLES = (1, 2, 4, 8, 16, 32)
_BUDGET_S = 0.3
_MOST_ROWS = 16_384
_MOST_SHARPENED_BYTES = 2**27
# Constants of torch on CPU: minimum elements per thread, and bytes of two of its widest vectors (it
# processes them in pairs).
_GRAIN = 32_768
_VECTOR_BYTES = 128


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Row widths of the element-wise functions, and how torch divides them among threads.

    Torch splits a tensor into even shares, one per thread but at most one per GRAIN elements, and computes
    each share in vectors. The remainder of a share is computed element by element, by code with other last
    bits. So every share must be whole vectors.
    """

    widths: tuple[int, ...] = ()
    num_threads: int = 1
    vector: int = 1

    def fits(self, num_rows: int) -> bool:
        """True if no thread's share has a remainder at this row count."""
        return all(self._rest(num_rows * width) == 0 for width in self.widths)

    def _rest(self, elements: int) -> int:
        return elements % (self.vector * min(self.num_threads, -(-elements // _GRAIN)))


@dataclass(frozen=True, slots=True)
class RowRule:
    """Allowed row counts: multiples of `multiple` from `minimum` to `maximum` that suit the element-wise functions."""

    minimum: int = 1
    multiple: int = 1
    maximum: int = 2**31 - 1
    elementwise: Elementwise = Elementwise()

    def padded(self, num_rows: int) -> int:
        """Smallest allowed row count that holds `num_rows` (at most `maximum`)."""
        rows = max(self.minimum, -(-num_rows // self.multiple) * self.multiple)
        while self.elementwise.widths and not self.elementwise.fits(rows):
            rows += self.multiple
        return rows

    def pieces(self, num_rows: int) -> list[tuple[int, int]]:
        """Ranges [begin, end) of at most `maximum` rows that cover `num_rows`."""
        return [(begin, min(begin + self.maximum, num_rows)) for begin in range(0, num_rows, self.maximum)]

    def joined(self, other: "RowRule") -> "RowRule | None":
        """Combine two measured rules into one that satisfies both; None if none does."""
        multiple = math.lcm(self.multiple, other.multiple)
        minimum = -(-max(self.minimum, other.minimum) // multiple) * multiple
        maximum = min(self.maximum, other.maximum) // multiple * multiple
        return RowRule(minimum, multiple, maximum) if minimum <= maximum else None


FREE = RowRule()


@dataclass(slots=True)
class RowModules:
    """Distinct modules that map rows to rows (equal weight shapes count as one), each with the form of its input.

    Modules with `keeps_row_bits` are left out: their results depend only on the row itself.
    """

    _found: dict[tuple[object, ...], tuple[nn.Module, int, int, torch.dtype]] = field(default_factory=dict)

    @contextmanager
    def collected(self, model: nn.Module) -> Iterator[None]:
        """Record the modules called by forward passes inside the block."""
        handles = [
            module.register_forward_hook(self._see)
            for module in model.modules()
            if not any(True for _ in module.children())
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, module: nn.Module, given: tuple[object, ...], out: object) -> None:
        if len(given) != 1 or not isinstance(given[0], torch.Tensor) or not isinstance(out, torch.Tensor):
            return
        if getattr(module, "keeps_row_bits", False):
            return
        x = given[0]
        if not x.is_floating_point() or x.ndim not in {2, 3} or out.shape[:-1] != x.shape[:-1]:
            return
        shapes = tuple((tuple(p.shape), p.dtype) for p in module.parameters(recurse=False))
        self._found.setdefault((type(module), shapes, x.shape[-1]), (module, x.ndim, x.shape[-1], x.dtype))

    def probes(self) -> "list[RowProbe]":
        """The recorded modules as functions of rows."""
        return [RowProbe(*entry) for entry in self._found.values()]


@dataclass(frozen=True, slots=True)
class RowProbe:
    """One module as a function of rows."""

    module: nn.Module
    ndim: int
    features: int
    dtype: torch.dtype

    @property
    def is_elementwise(self) -> bool:
        """True if the module has no weights."""
        return next(self.module.parameters(), None) is None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Map rows [n, features] to [n, out]."""
        return self.module(rows) if self.ndim == 2 else self.module(rows[None])[0]

    def sharpened(self) -> "RowProbe":
        """The same module with weights that cancel out against `anchor_rows`.

        The result is then pure rounding error, so a different order of summation shows at once. Needed
        where results are stored with fewer bits than they are summed with.
        """
        weights = [p for p in self.module.parameters(recurse=False) if p.ndim == 2]
        if self.dtype.itemsize >= 4 or len(weights) != 1 or weights[0].nbytes > _MOST_SHARPENED_BYTES:
            return self
        # Not a deep copy: a module may refer to the whole model and its cache.
        module = copy.copy(self.module)
        module._parameters = dict(module._parameters) | {
            name: nn.Parameter(_cancelling(p) if p.ndim == 2 else torch.zeros_like(p), requires_grad=False)
            for name, p in self.module.named_parameters(recurse=False)
        }
        return RowProbe(module, self.ndim, self.features, self.dtype)

    def anchor_rows(self) -> torch.Tensor:
        """Rows to compare with. Paired columns hold equal values, so that `sharpened` weights cancel."""
        rows = (
            _wide_normal(_ANCHOR_ROWS, self.features)
            if self.dtype.itemsize < 4
            else _normal(_ANCHOR_ROWS, self.features)
        )
        left, right = _pairs(self.features)
        rows[:, right] = rows[:, left]
        return rows.to(self.dtype)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator(0))


def _wide_normal(*shape: int) -> torch.Tensor:
    """Normal values of widely different magnitudes.

    Products of short floats of one magnitude would add up without rounding.
    """
    return _normal(*shape) * torch.exp2(torch.randint(-6, 7, shape, generator=_generator(1)))


def _pairs(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.randperm(size, generator=_generator(size))
    return order[: size // 2], order[size // 2 : size // 2 * 2]


def _cancelling(weight: torch.Tensor) -> torch.Tensor:
    """A matrix of the same shape that gives zero when multiplied with pairwise equal vectors, from either side."""
    (top, bottom), (left, right) = _pairs(weight.shape[0]), _pairs(weight.shape[1])
    part = _wide_normal(len(top), len(left))
    out = torch.zeros(weight.shape)
    for rows, columns, sign in ((top, left, 1), (top, right, -1), (bottom, left, -1), (bottom, right, 1)):
        out[rows[:, None], columns] = sign * part
    return out.to(weight.dtype)


def measure(probes: Sequence[RowProbe], max_rows: int, *, budget_s: float = _BUDGET_S) -> RowRule | None:
    """The rule under which all `probes` keep a row's bits for up to `max_rows` rows; None if there is none.

    Each probe is tried at many small counts, at `max_rows` (at most 16,384; larger steps are split) and, within
    `budget_s` seconds for all probes, at others in between. Trials catch element-wise functions too seldom; their
    rule is derived from how torch divides the work among threads.
    """
    tried = [probe for probe in probes if not probe.is_elementwise]
    rule: RowRule | None = RowRule(maximum=_MOST_ROWS) if tried and max_rows > _MOST_ROWS else FREE
    for probe in tried:
        found = _rule_of(_good_counts(probe.sharpened(), min(max_rows, _MOST_ROWS), budget_s / len(tried)))
        rule = rule.joined(found) if rule is not None and found is not None else None
    return replace(rule, elementwise=_elementwise(probes)) if rule is not None else None


def _elementwise(probes: Sequence[RowProbe]) -> Elementwise:
    found = [probe for probe in probes if probe.is_elementwise]
    if not found:
        return Elementwise()
    widths = tuple(sorted({probe.features for probe in found}))
    vector = max(_VECTOR_BYTES // probe.dtype.itemsize for probe in found)
    return Elementwise(widths, torch.get_num_threads(), vector)


def _good_counts(probe: RowProbe, max_rows: int, budget_s: float) -> dict[int, bool]:
    """Row counts tried, ascending, each with True if every row has the bits it has in the anchor."""
    anchor = probe.anchor_rows()
    expected = probe(anchor)
    results: dict[int, bool] = {}
    end = time.monotonic() + budget_s
    for i, count in enumerate((*_SMALL, max_rows, *(n for n in _LARGE if n < max_rows))):
        if i > len(_SMALL) and time.monotonic() > end:
            break
        places = torch.arange(count) * _STRIDE % _ANCHOR_ROWS
        results[count] = torch.equal(probe(anchor[places]), expected[places])
    return dict(sorted(results.items()))


def _rule_of(good: dict[int, bool]) -> RowRule | None:
    """The cheapest rule that the measurements allow: smallest multiple, then smallest minimum."""
    for multiple in _MULTIPLES:
        counts = [count for count in good if count % multiple == 0]
        minimum = next((m for m in counts if all(good[c] for c in counts if m <= c <= _ANCHOR_ROWS)), None)
        if minimum is not None and minimum <= _SMALL[-1]:
            bad = [count for count in counts if count > _ANCHOR_ROWS and not good[count]]
            below = [count for count in counts if minimum <= count and (not bad or count < bad[0])]
            return RowRule(minimum, multiple, FREE.maximum if not bad else below[-1])
    return None
