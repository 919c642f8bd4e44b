"""The last segments of a recording, in memory: each starts with a snapshot and can be replayed by itself."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from scheduler_svc.observe.recording.events import Event
from scheduler_svc.observe.recording.snapshot import Snapshot

_SEGMENTS_IN_RING = 4


@dataclass(slots=True)
class Segment:
    """Events behind a snapshot. `number`: counts all that there ever were. `first_step`: the next step when it began.

    `about`: policy, limits and whatever else the replay must know. `goes_on`: its core is that of the segment before.
    """

    number: int
    first_step: int
    about: dict[str, Any]
    goes_on: bool
    snapshot: Snapshot
    events: list[Event] = field(default_factory=list)
    num_steps: int = 0
    num_bytes: int = 0

    def as_of_now(self) -> "Segment":
        """One that does not grow any more."""
        return Segment(
            self.number,
            self.first_step,
            self.about,
            self.goes_on,
            self.snapshot,
            list(self.events),
            self.num_steps,
            self.num_bytes,
        )


@dataclass(frozen=True, slots=True)
class PackedSegment:
    """A complete segment as a frame of a file, which takes a fraction of its objects."""

    number: int
    first_step: int
    num_steps: int
    frame: bytes

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return len(self.frame)


Held = Segment | PackedSegment
Pack = Callable[[Segment], Future[PackedSegment]]


class Ring:
    """Owner of the segments. A segment ends after `segment_steps` steps or a quarter of `max_bytes`; the oldest go beyond that.

    It does not end before its events take as much as its snapshot, or a large core would be written down at each step. One segment
    is always held, so that it may take more than `max_bytes` where a single one does.

    With `pack` a complete segment is held packed as soon as that is done, and `max_bytes` is for packed ones: the newest, and one
    that is being packed, come on top of it.
    """

    def __init__(
        self,
        segment_steps: int,
        max_bytes: int,
        on_segment: Callable[[], None] | None = None,
        pack: Pack | None = None,
    ) -> None:
        """`on_segment`: called when one begins."""
        self._on_segment = on_segment
        self._pack = pack
        self._packing: Future[PackedSegment] | None = None
        self._segment_steps = segment_steps
        self._max_bytes = max_bytes
        self._segments: deque[Held] = deque()
        self._newest: Segment | None = None
        self._count = 0

    @property
    def num_bytes(self) -> int:
        """About what all segments take."""
        return sum(segment.num_bytes for segment in self._segments)

    @property
    def num_segments(self) -> int:
        """Segments that there ever were."""
        return self._count

    @property
    def is_full(self) -> bool:
        """The newest segment should take no further step."""
        newest = self._newest
        if newest is None:
            return True
        most_bytes = max(self._max_bytes // _SEGMENTS_IN_RING, 2 * newest.snapshot.num_bytes)
        return newest.num_steps >= self._segment_steps or newest.num_bytes >= most_bytes

    def begin(self, first_step: int, about: dict[str, Any], snapshot: Snapshot, *, goes_on: bool) -> None:
        """A new segment; what does not fit any more is dropped."""
        complete = self._newest
        goes_on = goes_on and complete is not None
        self._newest = Segment(self._count, first_step, about, goes_on, snapshot, num_bytes=snapshot.num_bytes)
        self._segments.append(self._newest)
        self._count += 1
        if self._pack is not None and complete is not None:
            self._take_packed(self._packing)
            self._packing = self._pack(complete)
        self._drop_oldest()
        if self._on_segment is not None:
            self._on_segment()

    def add(self, event: Event, *, num_steps: int = 0) -> None:
        """An event of the newest segment."""
        newest = self._newest
        assert newest is not None, "a segment has begun"
        newest.events.append(event)
        newest.num_steps += num_steps
        newest.num_bytes += event.num_bytes
        if self._packing is not None and self._packing.done():
            self._take_packed(self._packing)
            self._drop_oldest()

    def segments(self, since: int = 0) -> Iterator[Held]:
        """Those held from number `since` on, the newest as of now."""
        for segment in list(self._segments):
            if segment.number >= since:
                yield segment.as_of_now() if segment is self._newest else segment

    def place_of(self, step: int) -> tuple[int, int] | None:
        """Number of the segment that a step is in, and how many are held before it; None for a step that is held no more."""
        for position in range(len(self._segments) - 1, -1, -1):
            if self._segments[position].first_step <= step:
                return self._segments[position].number, position
        return None

    def _take_packed(self, packing: Future[PackedSegment] | None) -> None:
        """Waits for it where it is not done. Raises what packing raised."""
        if packing is None:
            return
        packed, self._packing = packing.result(), None
        place = packed.number - self._segments[0].number
        if place >= 0:
            self._segments[place] = packed

    def _drop_oldest(self) -> None:
        bounded = [s for s in self._segments if self._pack is None or isinstance(s, PackedSegment)]
        num_bytes = sum(segment.num_bytes for segment in bounded)
        while num_bytes > self._max_bytes and len(self._segments) > 1:
            num_bytes -= self._segments.popleft().num_bytes
