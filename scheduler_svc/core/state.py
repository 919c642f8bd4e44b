"""Queues and what belongs to them: the state that phases work on. Owned by the `Scheduler`."""

from dataclasses import dataclass, field

from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.parts import CacheRules
from scheduler_svc.core.plan import EndedSequence
from scheduler_svc.core.queues import SequenceQueue
from scheduler_svc.core.request import Request, Sequence, SequenceStatus


@dataclass(slots=True)
class CoreState:
    """All requests and where their sequences stand.

    `left`: sequences that the worker has not been told to forget yet. `on_worker`: names of those it holds.
    `finished`: requests that ended since the last plan.
    """

    limits: CoreLimits
    cache: CacheRules
    waiting: SequenceQueue
    running: list[Sequence] = field(default_factory=list)
    swapped: list[Sequence] = field(default_factory=list)
    requests: dict[str, Request] = field(default_factory=dict)
    left: dict[str, None] = field(default_factory=dict)
    on_worker: dict[str, None] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)

    def take_out(self, sequence: Sequence) -> None:
        """Removes it from whichever queue it is in."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is SequenceStatus.SWAPPED:
            self.swapped.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def leave_worker(self, sequence: Sequence) -> None:
        """The worker will be told to forget it with the next plan."""
        if self.on_worker.pop(sequence.name, 0) is None:
            self.left[sequence.name] = None

    def retire(self, sequence: Sequence, status: SequenceStatus, error: str | None = None) -> EndedSequence:
        """Ends a sequence, wherever it stands: out of its queue, blocks free, worker to forget it (R17, R35)."""
        self.take_out(sequence)
        self.cache.release(sequence)
        self.cache.forget(sequence)
        self.leave_worker(sequence)
        sequence.status = status
        request = sequence.request
        if request.is_finished:
            self.requests.pop(request.request_id)
            self.finished.append(request.request_id)
        return EndedSequence(
            name=sequence.name,
            request_id=request.request_id,
            index=sequence.index,
            status=status,
            num_output_tokens=sequence.num_output_tokens,
            request_done=request.is_finished,
            stop_token_id=sequence.stop_token_id,
            error=error,
        )
