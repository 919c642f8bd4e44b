"""Ownership of a worker: epochs, leases and which steps may run. A pure state machine; time is passed in.

    free ──hello──► owned, stream open ──stream gone──► owned, lease runs ──owner_lease_s──► free for others
                        ▲      │                              │
                        │      └── force / own reconnect ─────┤
                        └──────────── same scheduler ─────────┘ (resumes its epoch where results allow)

Streams, tasks and the engine belong to the service; results are opaque here.
"""

import enum
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from svc_common.errors import Aborted, FailedPrecondition

Result = TypeVar("Result")


class StepVerdict(enum.Enum):
    """What to do with a step."""

    RUN = "run"
    """It is the next step."""
    ANSWERED = "answered"
    """It has run: its result is in the record buffer."""
    PENDING = "pending"
    """It was accepted earlier and will be answered once, after it has run."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A scheduler's first message. `epoch` 0 requests a new epoch."""

    scheduler_boot_id: str
    epoch: int = 0
    worker_boot_id: str = ""
    last_step_id: int = 0
    force: bool = False


@dataclass(frozen=True, slots=True)
class Grant(Generic[Result]):
    """Granted ownership.

    `stream` identifies it in later calls. `results`: those the owner has not read yet (resumed only).
    """

    stream: int
    epoch: int
    resumed: bool
    results: tuple[Result, ...] = ()


@dataclass(slots=True)
class _Owner:
    boot_id: str
    stream: int
    """0 = closed."""
    free_at_s: float = 0.0
    """When others may take over after the stream closed."""


class Ownership(Generic[Result]):
    """State of epoch, owner and the last `ring_depth` results. `worker_boot_id` identifies this process's memory.

    Results of granted steps are kept at least until the owner sends another plan: by then it has read them.
    """

    def __init__(self, worker_boot_id: str, *, lease_s: float, ring_depth: int = 4) -> None:
        self.worker_boot_id = worker_boot_id
        self.epoch = 0
        self.last_accepted = 0
        self.last_answered = 0
        self._lease_s = lease_s
        self._ring_depth = ring_depth
        self._last_sent = 0
        self._ring: OrderedDict[int, Result] = OrderedDict()
        self._owner: _Owner | None = None
        self._num_streams = 0

    @property
    def num_open(self) -> int:
        """Steps accepted and not answered."""
        return self.last_accepted - self.last_answered

    def hello(self, hello: Hello, now_s: float) -> Grant[Result]:
        """Grant the worker to the scheduler, or refuse.

        Raises FailedPrecondition (WORKER_OWNED, with a retry time) while another scheduler owns it, and
        Aborted (EPOCH_OVER) if that scheduler took it over from this one. `force` takes over from any owner.
        After a new epoch the engine must be reset.
        """
        owner = self._owner
        mine = owner is not None and owner.boot_id == hello.scheduler_boot_id
        if owner is not None and not mine and not hello.force:
            self._refuse(hello, owner, now_s)
        self._num_streams += 1
        resumed = mine and self._can_resume(hello)
        if not resumed:
            self._begin_epoch()
        self._owner = _Owner(hello.scheduler_boot_id, self._num_streams)
        return Grant(self._num_streams, self.epoch, resumed, self._after(hello.last_step_id) if resumed else ())

    def _refuse(self, hello: Hello, owner: _Owner, now_s: float) -> None:
        """Refuse unless the present owner's lease has expired."""
        if not owner.stream and now_s >= owner.free_at_s:
            return
        retry_s = self._lease_s if owner.stream else owner.free_at_s - now_s
        state = "its stream is open" if owner.stream else f"its lease runs for {retry_s:.1f} s"
        metadata = {"owner": owner.boot_id, "caller": hello.scheduler_boot_id, "epoch": str(self.epoch)}
        had_it = hello.epoch and hello.worker_boot_id == self.worker_boot_id and hello.epoch < self.epoch
        if had_it:
            raise Aborted(
                f"epoch {hello.epoch} of scheduler {hello.scheduler_boot_id} is over: scheduler {owner.boot_id} owns this "
                f"worker in epoch {self.epoch}; send a hello with epoch 0 to request a new epoch",
                reason="EPOCH_OVER",
                metadata=metadata,
                retry_after_s=retry_s,
            )
        raise FailedPrecondition(
            f"scheduler {owner.boot_id} owns this worker in epoch {self.epoch} ({state}), so scheduler "
            f"{hello.scheduler_boot_id} cannot own it; stop the other one, wait, or take over with --force-ownership",
            reason="WORKER_OWNED",
            metadata=metadata,
            retry_after_s=retry_s,
        )

    def _can_resume(self, hello: Hello) -> bool:
        """True if every result the scheduler has not read is kept or still to come."""
        if hello.epoch != self.epoch or hello.worker_boot_id != self.worker_boot_id:
            return False
        oldest = next(iter(self._ring), self.last_answered + 1)
        return oldest - 1 <= hello.last_step_id <= self.last_answered

    def _begin_epoch(self) -> None:
        self.epoch += 1
        self.last_accepted = self.last_answered = self._last_sent = 0
        self._ring.clear()

    def _after(self, step_id: int) -> tuple[Result, ...]:
        return tuple(result for key, result in self._ring.items() if key > step_id)

    def leave(self, stream: int, now_s: float, *, goodbye: bool = False) -> None:
        """Start the lease of a closed stream. `goodbye`: the owner ended it in order, so others need not wait."""
        if self._owner is not None and self._owner.stream == stream:
            self._owner.stream = 0
            self._owner.free_at_s = now_s if goodbye else now_s + self._lease_s

    def is_current(self, stream: int) -> bool:
        """True if the stream is the owner's."""
        return self._owner is not None and self._owner.stream == stream and stream != 0

    def _replaced(self) -> Aborted:
        owner = self._owner.boot_id if self._owner is not None else "none"
        return Aborted(
            f"this stream was replaced; owner of the worker in epoch {self.epoch}: {owner}",
            reason="STREAM_REPLACED",
            metadata={"owner": owner, "epoch": str(self.epoch)},
        )

    def accept(self, stream: int, epoch: int, step_id: int) -> StepVerdict:
        """Judge a step; RUN counts it as accepted.

        Raises Aborted if stream or epoch is over, FailedPrecondition for a gap or for a step too old to
        answer.
        """
        if not self.is_current(stream):
            raise self._replaced()
        if epoch != self.epoch:
            raise Aborted(
                f"step {step_id} is of epoch {epoch}, the worker is in epoch {self.epoch}",
                reason="EPOCH_OVER",
                metadata={"theirs": str(epoch), "ours": str(self.epoch)},
            )
        if step_id == self.last_accepted + 1:
            self.last_accepted = self._last_sent = step_id
            return StepVerdict.RUN
        if step_id in self._ring:
            return StepVerdict.ANSWERED
        if self.last_answered < step_id <= self.last_accepted:
            return StepVerdict.PENDING
        raise self._out_of_order(step_id)

    def _out_of_order(self, step_id: int) -> FailedPrecondition:
        expected = self.last_accepted + 1
        metadata = {"step_id": str(step_id), "expected": str(expected)}
        if step_id > expected:
            return FailedPrecondition(
                f"step {step_id} leaves a gap: step {expected} is next in epoch {self.epoch}; send the missing steps, "
                "or send a hello with epoch 0 for a new epoch",
                reason="STEP_GAP",
                metadata=metadata,
            )
        return FailedPrecondition(
            f"step {step_id} has run and its result is no longer held (the last {self._ring_depth} are); "
            f"step {expected} is next in epoch {self.epoch}",
            reason="STEP_TOO_OLD",
            metadata=metadata,
        )

    def accept_granted(self) -> None:
        """Count a step that was begun by a grant as accepted."""
        self.last_accepted += 1

    def record(self, epoch: int, step_id: int, result: Result) -> bool:
        """Keep the result of an accepted step, in step order. Returns False and keeps nothing if its epoch is over."""
        if epoch != self.epoch:
            return False
        assert step_id == self.last_answered + 1 <= self.last_accepted, "results come in step order"
        self.last_answered = step_id
        self._ring[step_id] = result
        if len(self._ring) > self._ring_depth and next(iter(self._ring)) < self._last_sent:
            self._ring.popitem(last=False)
        return True

    def result(self, step_id: int) -> Result:
        """The kept result of a step judged ANSWERED."""
        return self._ring[step_id]

    def held(self) -> Iterable[int]:
        """Steps with kept results, ascending."""
        return tuple(self._ring)
