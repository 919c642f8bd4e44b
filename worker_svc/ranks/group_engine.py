"""The engine of rank 0: every call goes to the other ranks first, then to its own engine; results are compared.

Steps reach the others as the bytes of the scheduler's message, before rank 0 builds its own input. Unmentioned
rows repeat (docs/decisions/0001), so all ranks have the same rows; each step's answer is a checksum of them
and of the tokens that were drawn. A rank that differs, dies or hangs ends the group: DeviceLost.

With several stages, or on devices, several steps are in flight. All ranks launch and finish them in rank 0's order: it
sends FINISH where it finishes one. The result is the last stage's.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from paged_kernels.ranks import PeerLost
from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common.errors import FailedPrecondition, QuireError
from worker_svc.block_images import BlockImages
from worker_svc.engine import DeviceLost, Pending, Progress
from worker_svc.ranks.channel import Channel, MessageKind, RankWatch
from worker_svc.ranks.joining import Meeting
from worker_svc.ranks.member import GroupRanks
from worker_svc.ranks.step_answers import (
    STEP_ANSWER,
    RankEngine,
    RefusedStep,
    described,
    error_answer,
    finishes_at_launch,
    forget_adapter,
    launched,
    step_answer,
)
from worker_svc.settings import WorkerSettings

T = TypeVar("T")


class GroupEngine:
    """`Engine` of a group. `make`: makes the own engine when all ranks have joined. `on_lost`: called, on a thread, when a rank
    is lost; calls that run raise DeviceLost too."""

    def __init__(
        self,
        settings: WorkerSettings,
        meeting: Meeting,
        make: Callable[[GroupRanks], RankEngine],
        on_lost: Callable[[DeviceLost], None],
    ) -> None:
        self._settings, self._meeting, self._make, self._on_lost = settings, meeting, make, on_lost
        self._stop, self._is_loaded = threading.Event(), False
        self._ranks: GroupRanks | None = None
        self._channels: list[Channel] = []
        self._watch: RankWatch | None = None
        self._engine: RankEngine | None = None

    # --- the group -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the group in order: the other ranks end too. Callable from any thread."""
        self._stop.set()
        if self._watch is not None:
            self._watch.close()
        for channel in self._channels:
            with suppress(PeerLost):
                channel.send(MessageKind.GOODBYE)
            channel.close()
        if self._ranks is not None:
            self._ranks.lose(PeerLost("rank 0 has ended"))
        self._meeting.close()

    def _join(self, progress: Progress) -> None:
        size = self._settings.num_ranks
        try:
            self._ranks, self._channels = self._meeting.wait(
                lambda count: progress(f"ranks ({count} of {size})", 0.0), self._stop
            )
        except PeerLost as lost:
            raise DeviceLost(lost.message, reason="RANK_LOST") from lost
        self._watch = RankWatch(self._channels, self._lose)

    def _lose(self, why: PeerLost) -> None:
        """On the watch's thread."""
        assert self._ranks is not None
        self._ranks.lose(why)
        if self._is_loaded:  # a load says itself what is wrong
            self._on_lost(self._ended(why))

    def _ended(self, why: PeerLost) -> DeviceLost:
        assert self._ranks is not None
        known = self._ranks.lost or why
        message = f"the group of {self._ranks.size} ranks has ended: {known.message}"
        if known.differs:
            return DeviceLost(message, reason="RANKS_DIFFER")
        return DeviceLost(message, reason="RANK_LOST")

    def _end(self, why: PeerLost) -> DeviceLost:
        """End the group for a reason that this rank found."""
        assert self._ranks is not None
        self._ranks.lose(why)
        return self._ended(why)

    @contextmanager
    def _in_group(self) -> Iterator[None]:
        """Convert PeerLost to DeviceLost; to the peer's own error, if it said one before it ended. No call follows an end."""
        try:
            if self._ranks is not None and self._ranks.lost is not None:
                raise self._ranks.lost
            yield
        except PeerLost as lost:
            said = self._said_before_it_ended()
            ended = self._end(lost)
            if said is not None:
                raise said from lost
            raise ended from lost

    def _said_before_it_ended(self) -> QuireError | None:
        for channel in self._channels:
            if channel.is_broken():
                try:
                    while True:
                        channel.expect(MessageKind.ANSWER, 0.1)
                except PeerLost:
                    continue
                except QuireError as error:
                    return error
        return None

    def _together(self, name: str, own: Callable[[], T], **arguments: Any) -> tuple[T, list[bytes]]:
        """A call of all ranks: its own result and the others' answers. An error of its own comes before the others'."""
        content = json.dumps({"call": name, "arguments": arguments}).encode()
        with self._in_group():
            for channel in self._channels:
                channel.send(MessageKind.CALL, content)
            try:
                result = own()
            except PeerLost:
                raise
            except Exception:
                self._compare_failed()
                raise
            answers = self._answers(None)
        for answer in answers:
            if isinstance(answer, QuireError):
                raise answer
        return result, [answer for answer in answers if isinstance(answer, bytes)]

    def _compare_failed(self) -> None:
        """After an error of rank 0's own: ranks that do not answer either end the group."""
        try:
            self._answers(self._settings.rank_timeout_s)
        except PeerLost as lost:
            self._lose(lost)

    def _answers(self, timeout_s: float | None) -> list[bytes | QuireError]:
        found: list[bytes | QuireError] = []
        for channel in self._channels:
            try:
                found.append(channel.expect(MessageKind.ANSWER, timeout_s))
            except PeerLost:
                raise
            except QuireError as error:
                found.append(error)
        return found

    # --- Engine --------------------------------------------------------------------------------------------------------

    @property
    def _own(self) -> RankEngine:
        assert self._engine is not None, "load comes first"
        return self._engine

    @property
    def device(self) -> str:
        """See Engine."""
        return self._own.device

    @property
    def backend(self) -> str:
        """See Engine."""
        return self._own.backend

    @property
    def cache_layout(self) -> str:
        """Raise FailedPrecondition: each rank has a part of a block, and the others' cannot be fetched."""
        raise FailedPrecondition(
            "blocks of a worker of several ranks cannot be fetched or placed", reason="CACHE_LAYOUT"
        )

    @property
    def images(self) -> BlockImages:
        """See Engine. There are none."""
        return self._own.images

    @property
    def block_bytes(self) -> int:
        """See Engine. Of this rank's part."""
        return self._own.block_bytes

    def read_blocks(self, blocks: Sequence[int]) -> memoryview:
        """Never called: `cache_layout` raises."""
        raise AssertionError(f"the layout is asked for first, and refused: {self.cache_layout}")

    def load(self, progress: Progress) -> common_pb2.ModelLimits:
        """See Engine. Waits for the other ranks first."""
        self._join(progress)

        def own() -> common_pb2.ModelLimits:
            assert self._ranks is not None
            self._engine = self._make(self._ranks)
            return self._engine.load(progress)

        limits, _ = self._together("load", own)
        self._is_loaded = True
        return limits

    def bundle(self) -> bytes:
        """See Engine."""
        return self._own.bundle()

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> worker_pb2.ProfileCacheResponse:
        """See Engine. As many blocks as the rank with the fewest has."""
        own, answers = self._together(
            "profile",
            lambda: self._own.profile(max_num_batched_tokens, max_num_seqs),
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
        )
        others = [worker_pb2.ProfileCacheResponse.FromString(answer) for answer in answers]
        own.num_gpu_blocks = min(found.num_gpu_blocks for found in (own, *others))
        own.num_cpu_blocks = min(found.num_cpu_blocks for found in (own, *others))
        own.max_model_len = min((n for found in (own, *others) if (n := found.max_model_len)), default=0)
        own.readable += f"\nof rank 0; {len(others) + 1} ranks, each with its own: {own.num_gpu_blocks} blocks are used"
        return own

    def allocate(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """See Engine."""
        self._together(
            "allocate",
            lambda: self._own.allocate(num_gpu_blocks, num_cpu_blocks),
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
        )

    def load_adapter(self, adapter_id: int, path: str) -> tuple[int, int]:
        """See Engine. The folder must be at `path` on every rank's host. Bytes of this rank."""
        try:
            found, _ = self._together(
                "load_adapter", lambda: self._own.load_adapter(adapter_id, path), adapter_id=adapter_id, path=path
            )
        except DeviceLost:
            raise
        except QuireError:
            self._together("forget_adapter", lambda: forget_adapter(self._own, adapter_id), adapter_id=adapter_id)
            raise
        return found

    def unload_adapter(self, adapter_id: int) -> None:
        """See Engine."""
        self._together("unload_adapter", lambda: self._own.unload_adapter(adapter_id), adapter_id=adapter_id)

    def reset(self) -> None:
        """See Engine."""
        self._together("reset", self._own.reset)

    def launch(self, outputs: worker_pb2.SchedulerOutputs) -> Pending:
        """See Engine. A step that is refused is an error of its `finish`."""
        assert self._ranks is not None
        with self._in_group():
            content = outputs.SerializeToString()
            for channel in self._channels:
                channel.send(MessageKind.STEP, content)
            return _GroupPending(self, outputs, launched(self._own, self._ranks, outputs))

    def execute(self, outputs: worker_pb2.SchedulerOutputs) -> worker_pb2.WorkerOutputs:
        """See Engine."""
        return self.launch(outputs).finish()

    # --- steps ---------------------------------------------------------------------------------------------------------

    @property
    def has_one_stage(self) -> bool:
        """True if rank 0 knows when a step is ready."""
        assert self._ranks is not None
        return self._ranks.num_stages == 1

    def wait(self, pending: Pending) -> None:
        """See Pending. Callable from any thread."""
        try:
            pending.wait()
        except PeerLost as lost:
            raise self._end(lost) from lost

    def finish(self, outputs: worker_pb2.SchedulerOutputs, pending: Pending) -> worker_pb2.WorkerOutputs:
        """Finish a step of all ranks. No result is returned that a rank does not share."""
        with self._in_group():
            assert self._ranks is not None
            if not finishes_at_launch(self._own, self._ranks):
                for channel in self._channels:
                    channel.send(MessageKind.FINISH)
            if isinstance(pending, RefusedStep):
                self._check(error_answer(pending.error))
                raise pending.error
            try:
                result = pending.finish()
            except (PeerLost, DeviceLost):
                raise
            except Exception as error:
                raise PeerLost(f"rank 0 failed within a step: {error}") from error
            return self._result(result, self._check(step_answer(self._own, outputs, result)))

    def _check(self, own: bytes) -> bytes:
        """Compare the answers of all ranks; what follows the digests of one of them."""
        rest = b""
        for channel in self._channels:
            answer = channel.expect(MessageKind.ANSWER, self._settings.rank_timeout_s)
            digests = answer[: STEP_ANSWER.size]
            if digests != own:
                raise PeerLost(
                    f"{channel.peer} differs from rank 0 after a step: {described(digests)} there, {described(own)} here",
                    differs=True,
                )
            rest = rest or answer[STEP_ANSWER.size :]
        return rest

    def _result(self, own: worker_pb2.WorkerOutputs, drawn: bytes) -> worker_pb2.WorkerOutputs:
        """The result of the last stage, which alone has logprobs and embeddings, with the times of rank 0, which waited for it."""
        if not drawn:
            return own
        result = worker_pb2.WorkerOutputs.FromString(drawn)
        result.timings.CopyFrom(own.timings)
        return result


@dataclass(frozen=True, slots=True)
class _GroupPending:
    """A step that all ranks compute."""

    group: GroupEngine
    outputs: worker_pb2.SchedulerOutputs
    pending: Pending

    @property
    def is_ready(self) -> bool:
        """See Pending. The other ranks finish at about the same time. With several stages steps are finished in order."""
        return self.group.has_one_stage and self.pending.is_ready

    def wait(self) -> None:
        """See Pending."""
        self.group.wait(self.pending)

    def finish(self) -> worker_pb2.WorkerOutputs:
        """See Pending."""
        return self.group.finish(self.outputs, self.pending)
