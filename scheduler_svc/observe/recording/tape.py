"""What one process records: the ring of its cores' segments, and the names that tokens have in it."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.recording import codec, file_format
from scheduler_svc.observe.recording.alias import Alias
from scheduler_svc.observe.recording.recorder import AnyCore, RecordingCore
from scheduler_svc.observe.recording.ring import Held, PackedSegment, Ring, Segment
from svc_common.version import VERSION


@dataclass(frozen=True, slots=True)
class SentSegment:
    """A segment as a frame of a file, and where it stands: `num_left` more are held behind it."""

    number: int
    num_steps: int
    num_left: int
    frame: bytes


class Tape:
    """Owner of the ring and of the alias, both for the life of the process.

    `segment_steps`, `max_bytes`: as in `Ring`; either 0 = nothing is recorded. `verbatim`: tokens are recorded as they are.
    """

    def __init__(self, segment_steps: int, max_bytes: int, *, verbatim: bool, alias: Alias | None = None) -> None:
        self.is_on = segment_steps > 0 and max_bytes > 0
        self.rename = None if verbatim or not self.is_on else alias or Alias.drawn()
        self._grown = asyncio.Event()
        self._packer = ThreadPoolExecutor(1, thread_name_prefix="recording")
        self._ring = Ring(segment_steps, max_bytes, self._wake, self._pack_aside)

    def record(self, core: Scheduler, clock: Callable[[], float], about: dict[str, Any] | None = None) -> AnyCore:
        """The core, from now on with everything written down; it must hash prefixes by `rename`."""
        return RecordingCore(core, self._ring, clock, about) if self.is_on else core

    @property
    def num_segments(self) -> int:
        """Segments that there ever were; the newest may go on."""
        return self._ring.num_segments

    def place_of(self, step: int) -> tuple[int, int] | None:
        """Number of the segment that a step is in, and how many are held before it; None where it is not recorded (any more)."""
        return self._ring.place_of(step)

    async def wait(self, num_segments: int) -> None:
        """Until there were more than so many segments."""
        while self.num_segments <= num_segments:
            await self._grown.wait()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    def beginning(self) -> bytes:
        """The first bytes of a file of these segments."""
        return file_format.beginning({"quire": VERSION, "verbatim": self.rename is None})

    def segments(self, since: int = 0) -> list[Held]:
        """Those held from number `since` on, as they are at this moment; to be packed."""
        return list(self._ring.segments(since))

    def pack(self, segments: list[Held]) -> Iterator[SentSegment]:
        """They as frames; takes a while for one that is not packed, and nothing of the core, so that it may be done beside it."""
        for i, segment in enumerate(segments):
            packed = self._packed(segment)
            yield SentSegment(packed.number, packed.num_steps, len(segments) - 1 - i, packed.frame)

    def _pack_aside(self, segment: Segment) -> Future[PackedSegment]:
        return self._packer.submit(self._packed, segment)

    def _packed(self, segment: Held) -> PackedSegment:
        if isinstance(segment, PackedSegment):
            return segment
        frame = file_format.segment_frame(segment, self.rename)
        return PackedSegment(segment.number, segment.first_step, segment.num_steps, frame)

    def replayable(self, since_step: int = 0) -> list[Segment]:
        """Held segments from the one with step `since_step` on, under the names that a replay needs."""
        held = self.segments()
        start = max((i for i, segment in enumerate(held) if segment.first_step <= since_step), default=0)
        return [codec.decode(file_format.contents(self._packed(segment).frame)) for segment in held[start:]]


class TapeReader:
    """One reader's place on a tape. `leaves_open`: the newest segment is left for the time when it is complete.

    A reader slower than the ring misses what the ring no longer holds.
    """

    def __init__(self, tape: Tape, since: int, *, leaves_open: bool) -> None:
        self._tape = tape
        self._next = since
        self._leaves_open = leaves_open

    async def wait(self) -> None:
        """Until another segment is complete."""
        await self._tape.wait(self._next + 1)

    def new(self) -> Iterator[SentSegment]:
        """Segments that were not read yet, oldest first, as of the call."""
        segments = self._tape.segments(self._next)
        if self._leaves_open and segments and segments[-1].number == self._tape.num_segments - 1:
            segments.pop()
        if segments:
            self._next = segments[-1].number + 1
        return self._tape.pack(segments)
