"""In-memory buffer of a recording's last segments; each starts with a snapshot and can be replayed alone."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from scheduler_svc.observe.recording.events import Event
from scheduler_svc.observe.recording.snapshot import CoreSnapshot

_SEGMENTS_IN_RING = 4


@dataclass(slots=True)
class RecordingSegment:
    """A snapshot and the events after it. `number`: count of all segments so far. `first_step`: the step after the snapshot.

    `about`: policy, limits and whatever else a replay needs. `goes_on`: its core is that of the segment
    before.
    """

    number: int
    first_step: int
    about: dict[str, Any]
    goes_on: bool
    snapshot: CoreSnapshot
    events: list[Event] = field(default_factory=list)
    num_steps: int = 0
    num_bytes: int = 0

    def as_of_now(self) -> "RecordingSegment":
        """A copy that does not grow any more."""
        return RecordingSegment(
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
    """A complete segment as a frame of a file, a fraction of its objects' size."""

    number: int
    first_step: int
    num_steps: int
    frame: bytes

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return len(self.frame)


Held = RecordingSegment | PackedSegment
Pack = Callable[[RecordingSegment], Future[PackedSegment]]


class SegmentBuffer:
    """Buffer of segments. One ends after `segment_steps` steps or a quarter of `max_bytes`; beyond that the oldest are dropped.

    Snapshots of a large core are rare: a segment gets `segment_steps` steps for each MiB of its snapshot, and its events may become
    as large as the snapshot. One segment is always kept, even if it alone exceeds `max_bytes`.

    With `pack`, complete segments are replaced by packed ones once these are done, and `max_bytes` limits
    only the packed ones: the newest, and one being packed, come on top.
    """

    def __init__(
        self,
        segment_steps: int,
        max_bytes: int,
        on_segment: Callable[[], None] | None = None,
        pack: Pack | None = None,
    ) -> None:
        """`on_segment`: called when a segment begins."""
        self._on_segment = on_segment
        self._pack = pack
        self._packing: Future[PackedSegment] | None = None
        self._segment_steps = segment_steps
        self._max_bytes = max_bytes
        self._segments: deque[Held] = deque()
        self._newest: RecordingSegment | None = None
        self._most_bytes = self._most_steps = 0
        self._count = 0

    @property
    def num_bytes(self) -> int:
        """Approximate size of all segments."""
        return sum(segment.num_bytes for segment in self._segments)

    @property
    def num_segments(self) -> int:
        """Number of segments ever begun."""
        return self._count

    @property
    def is_full(self) -> bool:
        """True if the newest segment should take no further step."""
        newest = self._newest
        if newest is None:
            return True
        return newest.num_steps >= self._most_steps or newest.num_bytes >= self._most_bytes

    def begin(self, first_step: int, about: dict[str, Any], snapshot: CoreSnapshot, *, goes_on: bool) -> None:
        """Begin a new segment, and drop old ones beyond the limit."""
        complete = self._newest
        goes_on = goes_on and complete is not None
        num_bytes = snapshot.num_bytes
        self._newest = RecordingSegment(self._count, first_step, about, goes_on, snapshot, num_bytes=num_bytes)
        self._most_bytes = max(self._max_bytes // _SEGMENTS_IN_RING, 2 * num_bytes)
        self._most_steps = self._segment_steps * -(-num_bytes // 2**20)
        self._segments.append(self._newest)
        self._count += 1
        if self._pack is not None and complete is not None:
            self._take_packed(self._packing)
            self._packing = self._pack(complete)
        self._drop_oldest()
        if self._on_segment is not None:
            self._on_segment()

    def add(self, event: Event, *, num_steps: int = 0) -> None:
        """Append an event to the newest segment."""
        newest = self._newest
        assert newest is not None, "a segment has begun"
        newest.events.append(event)
        newest.num_steps += num_steps
        newest.num_bytes += event.num_bytes
        if self._packing is not None and self._packing.done():
            self._take_packed(self._packing)
            self._drop_oldest()

    def segments(self, since: int = 0) -> Iterator[Held]:
        """Kept segments from number `since` on, the newest as of now."""
        for segment in list(self._segments):
            if segment.number >= since:
                yield segment.as_of_now() if segment is self._newest else segment

    def place_of(self, step: int) -> tuple[int, int] | None:
        """Number of the segment with that step, and how many kept ones precede it; None if it is not kept any more."""
        for position in range(len(self._segments) - 1, -1, -1):
            if self._segments[position].first_step <= step:
                return self._segments[position].number, position
        return None

    def _take_packed(self, packing: Future[PackedSegment] | None) -> None:
        """Replace a segment by its packed form, waiting for it if needed. Raises what packing raised."""
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
