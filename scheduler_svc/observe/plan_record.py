"""What a core decided in one step, as columns: cheap to keep and easy to compare.

In fast decode, names, token counts and flags equal those of the lane's step before, and so do the differences of the tokens
computed before; such a step shares its `StepShapeColumns` with the one before.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from block_manager.cache_rules import StateBlocks
from scheduler_svc.core.fast_decode.share import FastShare
from scheduler_svc.core.plan import BatchSignature, EndedSequence, ScheduledSequence, StepPlan
from svc_common import wire_arrays

FRESH, RESUMED, SAMPLES, PREFILL = 1, 2, 4, 8
Ending = list[Any]
Pairs = Sequence[Sequence[int]]


@dataclass(slots=True, eq=False)
class StepShapeColumns:
    """The scheduled sequences and how they run. `lead`: int32, tokens computed before the step minus those of the first sequence.

    `tokens`: int32, empty = one each. `flags`: a byte each, empty = all plain decodes.
    """

    names: tuple[str, ...]
    tokens: bytes
    lead: bytes
    flags: bytes

    @property
    def sampling(self) -> tuple[str, ...]:
        """Names of the sequences that yield a token."""
        return self._with(SAMPLES) if self.flags else self.names

    @property
    def fresh(self) -> tuple[str, ...]:
        """Names of the sequences that are sent to the worker whole."""
        return self._with(FRESH) if self.flags else ()

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each sequence."""
        return _ints(self.tokens).tolist() if self.tokens else [1] * len(self.names)

    @property
    def is_prefill(self) -> list[bool]:
        """Whether each sequence is in prefill."""
        return [bool(f & PREFILL) for f in self.flags] if self.flags else [False] * len(self.names)

    @property
    def token_counts(self) -> tuple[int, int]:
        """Tokens of prefills and of decodes."""
        num_all = int(_ints(self.tokens).sum()) if self.tokens else len(self.names)
        num_prefill = sum(n for n, is_prefill in zip(self.num_tokens, self.is_prefill, strict=True) if is_prefill)
        return num_prefill, num_all - num_prefill

    @property
    def num_bytes(self) -> int:
        """Approximate size."""
        return 200 + 8 * len(self.names) + len(self.tokens) + len(self.lead) + len(self.flags)

    def is_like(self, other: "StepShapeColumns") -> bool:
        """True if all columns are equal."""
        if self.lead != other.lead or (self.tokens, self.flags) != (other.tokens, other.flags):
            return False
        return self.names is other.names or self.names == other.names

    def _with(self, flag: int) -> tuple[str, ...]:
        return tuple([name for name, flags in zip(self.names, self.flags, strict=True) if flags & flag])


@dataclass(slots=True)
class PlanRecord:
    """One plan; sequences are lists, or () if empty. Pairs are [source, destination].

    `first_computed`: tokens of the first sequence computed before the step.
    `blocks`: repeated (index in the plan, count, new block ids...). `drafts`, `cached_blocks`: [index, number]
    where nonzero. `states_to_read`, `states_to_keep`: [index, number of tokens, blocks...]. `ended`: in the form of
    `ending_of`. `num_granted_steps`, `is_repeat`, `revoked`: see `policies/mixed/decode_grants`.
    """

    step: int
    lane: int
    shape: StepShapeColumns
    first_computed: int = 0
    num_batched_tokens: int = 0
    num_prefill_groups: int = 0
    num_lookahead_slots: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_swapped: int = 0
    free_gpu: int = 0
    free_cpu: int = 0
    blocks: Sequence[int] = ()
    drafts: Pairs = ()
    cached_blocks: Pairs = ()
    swap_in: Pairs = ()
    swap_out: Pairs = ()
    copy: Pairs = ()
    states_to_read: Pairs = ()
    states_to_keep: Pairs = ()
    preempted: Sequence[Sequence[str]] = ()
    left: Sequence[str] = ()
    finished: Sequence[str] = ()
    ended: Sequence[Ending] = ()
    lookups: Sequence[Sequence[Any]] = ()
    late: Sequence[str] = ()
    num_granted_steps: int = 0
    is_repeat: bool = False
    revoked: str = ""

    @property
    def num_bytes(self) -> int:
        """Approximate size without the shape."""
        return 350 + 60 * sum(map(len, _SEQUENCES(self))) + 8 * len(self.blocks)

    @property
    def computed_before(self) -> list[int]:
        """Tokens computed before the step, of each sequence."""
        before: list[int] = (_ints(self.shape.lead) + self.first_computed).tolist()
        return before

    def new_blocks(self) -> Iterator[tuple[str, Sequence[int]]]:
        """The sequences that got blocks, with their ids."""
        start = 0
        while start < len(self.blocks):
            index, end = self.blocks[start], start + 2 + self.blocks[start + 1]
            yield self.shape.names[index], self.blocks[start + 2 : end]
            start = end


_SEQUENCES = attrgetter(*(f.name for f in fields(PlanRecord) if f.default == () and f.name != "blocks"))


def ending_of(ended: EndedSequence) -> Ending:
    """[name, status, number of output tokens, error]."""
    return [ended.name, int(ended.status), ended.num_output_tokens, ended.error]


def endings(ended: Iterable[EndedSequence]) -> list[Ending]:
    """`ending_of` each."""
    return [ending_of(e) for e in ended]


class PlanFreezer:
    """Converts plans to records; keeps the last shape of each lane, which the lane's next record may share."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[BatchSignature | None, StepShapeColumns]] = {}
        self._latest: list[tuple[StepPlan, PlanRecord]] = []

    def of_all(self, plans: Sequence[StepPlan]) -> list[PlanRecord]:
        """Records of all plans of a `schedule` call; `of` returns them until the next call."""
        self._latest, records = [], []
        for plan in plans:
            record = self._frozen(plan)
            self._latest.append((plan, record))
            records.append(record)
        return records

    def of(self, plan: StepPlan) -> PlanRecord:
        """The record of a plan."""
        for known, record in self._latest:
            if known is plan:
                return record
        return self._frozen(plan)

    def _frozen(self, plan: StepPlan) -> PlanRecord:
        signature = plan.batch_signature
        last_signature, shape = self._last.get(plan.lane, (None, None))
        entries: list[ScheduledSequence] = []
        if signature is not None and shape is not None and signature.follows(last_signature):
            first_computed = signature.num_computed
        else:
            entries = plan.scheduled
            first_computed = entries[0].computed_before if entries else 0
            shape = _shape(entries, first_computed, shape)
        self._last[plan.lane] = signature, shape
        record = PlanRecord(
            step=plan.step,
            lane=plan.lane,
            shape=shape,
            first_computed=first_computed,
            num_batched_tokens=plan.num_batched_tokens,
            num_prefill_groups=plan.num_prefill_groups,
            num_lookahead_slots=plan.num_lookahead_slots,
            num_waiting=plan.num_waiting,
            num_running=plan.num_running,
            num_swapped=plan.num_swapped,
            free_gpu=plan.free_gpu,
            free_cpu=plan.free_cpu,
            left=plan.left or (),
            finished=plan.finished or (),
            late=plan.late or (),
            num_granted_steps=plan.grant.num_steps if plan.grant is not None else 0,
            is_repeat=plan.is_repeat,
            revoked=plan.revoked or "",
        )
        if entries:
            _add_entries(record, entries)
        elif plan.fast is not None and plan.fast.new_blocks:
            record.blocks = _fast_blocks(plan.fast)
        _add_rare(record, plan)
        return record


def _add_entries(record: PlanRecord, entries: list[ScheduledSequence]) -> None:
    record.blocks = _blocks(entries) or ()
    record.drafts = [[i, e.num_drafts] for i, e in enumerate(entries) if e.num_drafts] or ()
    record.cached_blocks = [[i, e.num_cached_blocks] for i, e in enumerate(entries) if e.num_cached_blocks] or ()


def _add_rare(record: PlanRecord, plan: StepPlan) -> None:
    """Fill the fields that are empty in most steps."""
    for name in ("swap_in", "swap_out", "copy", "preempted", "lookups"):
        if items := getattr(plan, name):
            setattr(record, name, [list(item) for item in items])
    if plan.ended:
        record.ended = endings(plan.ended)
    if plan.states is not None:
        places = {name: at for at, name in enumerate(record.shape.names)}
        record.states_to_read = _states(plan.states.to_read, places) or ()
        record.states_to_keep = _states(plan.states.to_keep, places) or ()


def _states(moves: Sequence[StateBlocks], places: Mapping[str, int]) -> list[list[int]]:
    return [[places[each.name], each.num_tokens, *each.block_ids] for each in moves]


def _shape(entries: list[ScheduledSequence], first_computed: int, last: StepShapeColumns | None) -> StepShapeColumns:
    names = tuple([e.name for e in entries])
    counts = [e.num_tokens for e in entries]
    flags = bytes(
        [e.fresh * FRESH | e.resumed * RESUMED | e.samples * SAMPLES | e.is_prefill * PREFILL for e in entries]
    )
    made = StepShapeColumns(
        names=last.names if last is not None and last.names == names else names,
        tokens=b"" if all(n == 1 for n in counts) else wire_arrays.pack(counts),
        lead=wire_arrays.pack([e.computed_before - first_computed for e in entries]),
        flags=b"" if flags.count(SAMPLES) == len(flags) else flags,
    )
    return last if last is not None and made.is_like(last) else made


def _blocks(entries: list[ScheduledSequence]) -> list[int]:
    found: list[int] = []
    for i, entry in enumerate(entries):
        if entry.new_block_ids:
            found += (i, len(entry.new_block_ids), *entry.new_block_ids)
    return found


def _fast_blocks(share: FastShare) -> list[int]:
    found: list[int] = []
    rows = sorted(share.new_blocks)
    for place, row in zip(np.searchsorted(share.rows, rows).tolist(), rows, strict=True):
        found += (place, len(share.new_blocks[row]), *share.new_blocks[row])
    return found


def _ints(data: bytes) -> NDArray[np.int32]:
    return np.frombuffer(data, wire_arrays.I32)
