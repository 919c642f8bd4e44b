"""What a core decided in one step, compact to keep and easy to compare.

In fast decode, names, token counts and flags equal those of the step before, and so does `computed before -
step`; such a step shares its `StepShapeColumns` with the one before.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from scheduler_svc.core.fast_decode.share import SteadyShare
from scheduler_svc.core.plan import EndedSequence, ScheduledSequence, StepPlan
from scheduler_svc.observe.recording.inputs import ints

_I32 = np.dtype("<i4")
_FRESH, _RESUMED, _SAMPLES, _PREFILL = 1, 2, 4, 8
_FLAG_NAMES = {_FRESH: "fresh", _RESUMED: "resumed", _SAMPLES: "samples", _PREFILL: "is_prefill"}
Ending = list[Any]


@dataclass(slots=True, eq=False)
class StepShapeColumns:
    """The scheduled sequences and how they run. `lead`: int32, tokens computed before the step minus the step number.

    `tokens`: int32, empty = one each. `flags`: a byte each, empty = all plain decodes.
    """

    names: tuple[str, ...]
    tokens: bytes
    lead: bytes
    flags: bytes

    @property
    def sampling(self) -> tuple[str, ...]:
        """Names of the sequences that yield a token."""
        if not self.flags:
            return self.names
        return tuple(name for name, flags in zip(self.names, self.flags, strict=True) if flags & _SAMPLES)

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each sequence."""
        return np.frombuffer(self.tokens, _I32).tolist() if self.tokens else [1] * len(self.names)

    def computed_before(self, step: int) -> list[int]:
        """Tokens computed before the step, of each sequence."""
        before: list[int] = (np.frombuffer(self.lead, _I32) + step).tolist()
        return before

    @property
    def is_prefill(self) -> list[bool]:
        """Whether each sequence is in prefill."""
        return [bool(f & _PREFILL) for f in self.flags] if self.flags else [False] * len(self.names)

    @property
    def num_bytes(self) -> int:
        """Approximate size."""
        return 200 + 8 * len(self.names) + len(self.tokens) + len(self.lead) + len(self.flags)


@dataclass(slots=True)
class Decision:
    """One plan. Pairs are [source, destination]; `blocks`: repeated (index in the plan, count, new block ids...).

    `drafts`, `cached_blocks`: [index, number] where nonzero. `ended`: in the form of `ending_of`.
    """

    step: int
    lane: int
    shape: StepShapeColumns
    num_batched_tokens: int = 0
    num_prefill_groups: int = 0
    num_lookahead_slots: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_swapped: int = 0
    free_gpu: int = 0
    free_cpu: int = 0
    blocks: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    cached_blocks: list[list[int]] = field(default_factory=list)
    swap_in: list[list[int]] = field(default_factory=list)
    swap_out: list[list[int]] = field(default_factory=list)
    copy: list[list[int]] = field(default_factory=list)
    preempted: list[list[str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    ended: list[Ending] = field(default_factory=list)
    lookups: list[list[Any]] = field(default_factory=list)
    late: list[str] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Approximate size without the shape."""
        lists = (getattr(self, name) for name in _LISTS)
        return 350 + 60 * sum(map(len, lists)) + 8 * len(self.blocks)


_LISTS = tuple(f.name for f in fields(Decision) if f.default_factory is list and f.name != "blocks")
_PLAIN = tuple(f.name for f in fields(Decision) if f.name != "shape")


def ending_of(ended: EndedSequence) -> Ending:
    """[name, status, number of output tokens, error]."""
    return [ended.name, int(ended.status), ended.num_output_tokens, ended.error]


def endings(ended: Iterable[EndedSequence]) -> list[Ending]:
    """`ending_of` each."""
    return [ending_of(e) for e in ended]


class DecisionMaker:
    """Converts plans to decisions; keeps the last shape, which the next decision may share."""

    def __init__(self) -> None:
        self._shape: StepShapeColumns | None = None
        self._course: tuple[object, int] | None = None

    def forget(self) -> None:
        """Make the next decision have a shape of its own."""
        self._shape = self._course = None

    def of(self, plan: StepPlan) -> Decision:
        """The decision in a plan."""
        course = plan.course
        goes_on = course is not None and course == self._course
        blocks = _steady_blocks(plan.steady) if goes_on and plan.steady is not None else None
        entries = [] if goes_on else plan.scheduled
        if not goes_on or self._shape is None:
            self._shape = _shape(entries, plan.step, self._shape)
        self._course = course
        decision = Decision(
            step=plan.step,
            lane=plan.lane,
            shape=self._shape,
            num_batched_tokens=plan.num_batched_tokens,
            num_prefill_groups=plan.num_prefill_groups,
            num_lookahead_slots=plan.num_lookahead_slots,
            num_waiting=plan.num_waiting,
            num_running=plan.num_running,
            num_swapped=plan.num_swapped,
            free_gpu=plan.free_gpu,
            free_cpu=plan.free_cpu,
            blocks=_blocks(entries) if blocks is None else blocks,
            left=plan.left,
            finished=plan.finished,
            late=plan.late,
        )
        _add_rare(decision, plan, entries)
        return decision


def _add_rare(decision: Decision, plan: StepPlan, entries: list[ScheduledSequence]) -> None:
    """Fill the fields that are empty in most steps."""
    decision.drafts = [[i, e.num_drafts] for i, e in enumerate(entries) if e.num_drafts]
    decision.cached_blocks = [[i, e.num_cached_blocks] for i, e in enumerate(entries) if e.num_cached_blocks]
    for name in ("swap_in", "swap_out", "copy", "preempted", "lookups"):
        if items := getattr(plan, name):
            setattr(decision, name, [list(item) for item in items])
    if plan.ended:
        decision.ended = endings(plan.ended)


def _shape(entries: list[ScheduledSequence], step: int, last: StepShapeColumns | None) -> StepShapeColumns:
    names = tuple([e.name for e in entries])
    counts = [e.num_tokens for e in entries]
    flags = bytes(
        [e.fresh * _FRESH | e.resumed * _RESUMED | e.samples * _SAMPLES | e.is_prefill * _PREFILL for e in entries]
    )
    made = StepShapeColumns(
        names=last.names if last is not None and last.names == names else names,
        tokens=b"" if all(n == 1 for n in counts) else ints(counts),
        lead=ints([e.computed_before - step for e in entries]),
        flags=b"" if flags.count(_SAMPLES) == len(flags) else flags,
    )
    return last if last is not None and same_shape(made, last) else made


def same_shape(a: StepShapeColumns, b: StepShapeColumns) -> bool:
    """True if both shapes are equal."""
    return (
        a.lead == b.lead and (a.tokens, a.flags) == (b.tokens, b.flags) and (a.names is b.names or a.names == b.names)
    )


def _blocks(entries: list[ScheduledSequence]) -> list[int]:
    found: list[int] = []
    for i, entry in enumerate(entries):
        if entry.new_block_ids:
            found += (i, len(entry.new_block_ids), *entry.new_block_ids)
    return found


def _steady_blocks(share: SteadyShare) -> list[int]:
    found: list[int] = []
    if share.new_blocks:
        rows = sorted(share.new_blocks)
        for place, row in zip(np.searchsorted(share.rows, rows).tolist(), rows, strict=True):
            found += (place, 1, share.new_blocks[row])
    return found


# --- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two runs."""

    step: int
    field: str
    recorded: Any
    got: Any


def first_difference(recorded: Decision, got: Decision) -> Difference | None:
    """The most significant difference between two decisions; None if they are equal."""
    if recorded.shape is not got.shape and not same_shape(recorded.shape, got.shape):
        found = _shape_difference(recorded, got)
        if found is not None:
            return found
    for name in _PLAIN:
        a, b = getattr(recorded, name), getattr(got, name)
        if a != b:
            return Difference(recorded.step, name, a, b)
    return None


def _shape_difference(recorded: Decision, got: Decision) -> Difference | None:
    a, b, step = recorded.shape, got.shape, recorded.step
    if a.names != b.names:
        return Difference(step, "scheduled", list(a.names), list(b.names))
    for name, values in _COLUMNS.items():
        of_a, of_b = values(recorded), values(got)
        pairs = [(n, x, y) for n, x, y in zip(a.names, of_a, of_b, strict=True) if x != y]
        if pairs:
            return Difference(step, name, {n: x for n, x, _ in pairs}, {n: y for n, _, y in pairs})
    return None


def _flags(decision: Decision) -> list[str]:
    flags = decision.shape.flags or bytes([_SAMPLES]) * len(decision.shape.names)
    return [" ".join(name for bit, name in _FLAG_NAMES.items() if flag & bit) for flag in flags]


_COLUMNS: dict[str, Callable[[Decision], list[Any]]] = {
    "num_tokens": lambda d: d.shape.num_tokens,
    "computed_before": lambda d: d.shape.computed_before(d.step),
    "flags": _flags,
}
