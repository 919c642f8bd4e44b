"""A step while it is being planned; thrown away once it is a `StepPlan`."""

from dataclasses import dataclass, field

from scheduler_svc.core.plan import EndedSequence, ScheduledSequence, StepPlan
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.state import CoreState


@dataclass(slots=True)
class DraftEntry:
    """One sequence's share so far. `blocks`: its whole table when `fresh`, else the added ones."""

    sequence: Sequence
    num_tokens: int
    computed_before: int
    blocks: list[int]
    fresh: bool
    resumed: bool

    def freeze(self) -> ScheduledSequence:
        """Its form in the plan."""
        s = self.sequence
        reach = self.computed_before + self.num_tokens
        return ScheduledSequence(
            name=s.name,
            request_id=s.request.request_id,
            index=s.index,
            num_tokens=self.num_tokens,
            computed_before=self.computed_before,
            new_block_ids=self.blocks,
            fresh=self.fresh,
            resumed=self.resumed,
            samples=reach >= s.num_tokens,
            is_prefill=self.num_tokens > 1 or s.num_output_tokens == 0 or reach < s.num_tokens,
            num_prompt_tokens=s.num_prompt_tokens,
            token_ids=list(s.token_ids) if self.fresh else None,
        )


@dataclass(slots=True)
class StepDraft:
    """Entries in scheduling order (dicts keep it), preemptions and lookups in order of happening."""

    now: float
    entries: dict[str, DraftEntry] = field(default_factory=dict)
    preempted: list[tuple[str, str]] = field(default_factory=list)
    lookups: list[tuple[str, int]] = field(default_factory=list)
    ended: list[EndedSequence] = field(default_factory=list)

    def add(self, sequence: Sequence, num_tokens: int, blocks: list[int], *, fresh: bool, resumed: bool) -> None:
        """Schedules `num_tokens` of a sequence."""
        self.entries[sequence.name] = DraftEntry(
            sequence, num_tokens, sequence.num_computed_tokens, blocks, fresh, resumed
        )

    def withdraw(self, sequence: Sequence, state: CoreState) -> int:
        """Takes a sequence out again, what it was to compute is no prefix of anybody; the tokens it had, 0 when not in."""
        entry = self.entries.pop(sequence.name, None)
        if entry is None:
            return 0
        state.cache.retract(sequence, entry.computed_before)
        return entry.num_tokens

    def seal(self, step: int, lane: int, state: CoreState) -> StepPlan:
        """The plan, with the queues as they stand now."""
        left, state.left = list(state.left), {}
        finished, state.finished = state.finished, []
        return StepPlan(
            step=step,
            lane=lane,
            scheduled=[entry.freeze() for entry in self.entries.values()],
            preempted=self.preempted,
            left=left,
            finished=finished,
            ended=self.ended,
            lookups=self.lookups,
            num_waiting=len(state.waiting),
            num_running=len(state.running),
            num_swapped=len(state.swapped),
            free_gpu=state.cache.num_free_gpu,
            free_cpu=state.cache.num_free_cpu,
        )
