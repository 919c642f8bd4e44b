"""The record buffer of one process: its cores' segments and the renaming of tokens in them."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.plan_record import PlanFreezer
from scheduler_svc.observe.recording import codec, file_format
from scheduler_svc.observe.recording.recorder import AnyCore, RecordingCore
from scheduler_svc.observe.recording.segment_buffer import Held, PackedSegment, RecordingSegment, SegmentBuffer
from scheduler_svc.observe.recording.token_alias import TokenAlias
from svc_common.version import VERSION


@dataclass(frozen=True, slots=True)
class SentSegment:
    """A segment as a frame of a file; `num_left` more segments follow it in the buffer."""

    number: int
    num_steps: int
    num_left: int
    frame: bytes


class RecordBuffer:
    """Record buffer with its token renaming, both for the life of the process.

    `segment_steps`, `max_bytes`: as in `SegmentBuffer`; recording is off if either is 0. `verbatim`: do not rename
    tokens. `freezer`: makes the records of plans, for others too.
    """

    def __init__(self, segment_steps: int, max_bytes: int, *, verbatim: bool, alias: TokenAlias | None = None) -> None:
        self.is_on = segment_steps > 0 and max_bytes > 0
        self.rename = None if verbatim or not self.is_on else alias or TokenAlias.drawn()
        self.freezer = PlanFreezer()
        self._grown = asyncio.Event()
        self._packer = ThreadPoolExecutor(1, thread_name_prefix="recording")
        self._buffer = SegmentBuffer(segment_steps, max_bytes, self._wake, self._pack_aside)

    def record(self, core: Scheduler, clock: Callable[[], float], about: dict[str, Any] | None = None) -> AnyCore:
        """Wrap a core so that it is recorded; it must hash prefixes with `rename`. Returns it as is if recording is off."""
        return RecordingCore(core, self._buffer, clock, about, self.freezer) if self.is_on else core

    @property
    def num_segments(self) -> int:
        """Number of segments ever begun; the newest may still grow."""
        return self._buffer.num_segments

    def place_of(self, step: int) -> tuple[int, int] | None:
        """Number of the segment with that step, and how many kept ones precede it; None if the step is not recorded (any more)."""
        return self._buffer.place_of(step)

    async def wait(self, num_segments: int) -> None:
        """Wait until more than `num_segments` segments have begun."""
        while self.num_segments <= num_segments:
            await self._grown.wait()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    def beginning(self) -> bytes:
        """The first bytes of a file of these segments."""
        return file_format.beginning({"quire": VERSION, "verbatim": self.rename is None})

    def segments(self, since: int = 0) -> list[Held]:
        """Kept segments from number `since` on, as of now, for `pack`."""
        return list(self._buffer.segments(since))

    def pack(self, segments: list[Held]) -> Iterator[SentSegment]:
        """The segments as frames. Slow for unpacked ones; it does not use the core, so it may run in a thread."""
        for i, segment in enumerate(segments):
            packed = self._packed(segment)
            yield SentSegment(packed.number, packed.num_steps, len(segments) - 1 - i, packed.frame)

    def _pack_aside(self, segment: RecordingSegment) -> Future[PackedSegment]:
        return self._packer.submit(self._packed, segment)

    def _packed(self, segment: Held) -> PackedSegment:
        if isinstance(segment, PackedSegment):
            return segment
        frame = file_format.segment_frame(segment, self.rename)
        return PackedSegment(segment.number, segment.first_step, segment.num_steps, frame)

    def replayable(self, since_step: int = 0) -> list[RecordingSegment]:
        """Kept segments from the one with step `since_step` on, with tokens renamed as a replay needs."""
        held = self.segments()
        start = max((i for i, segment in enumerate(held) if segment.first_step <= since_step), default=0)
        return [codec.decode(file_format.contents(self._packed(segment).frame)) for segment in held[start:]]


class RecordBufferReader:
    """Position of one reader in the record buffer. `leaves_open`: skip the newest segment until it is complete.

    A reader slower than the buffer skips the segments that the buffer dropped.
    """

    def __init__(self, record_buffer: RecordBuffer, since: int, *, leaves_open: bool) -> None:
        self._record_buffer = record_buffer
        self._next = since
        self._leaves_open = leaves_open

    async def wait(self) -> None:
        """Wait until another segment is complete."""
        await self._record_buffer.wait(self._next + 1)

    def new(self) -> Iterator[SentSegment]:
        """Segments that were not read yet, oldest first, as of the call."""
        segments = self._record_buffer.segments(self._next)
        if self._leaves_open and segments and segments[-1].number == self._record_buffer.num_segments - 1:
            segments.pop()
        if segments:
            self._next = segments[-1].number + 1
        return self._record_buffer.pack(segments)
