"""The last segments of a recording, in memory: each starts with a snapshot and can be replayed by itself."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from scheduler_svc.recording.events import Event
from scheduler_svc.recording.snapshot import Snapshot

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


class Ring:
    """Owner of the segments. A segment ends after `segment_steps` steps or a quarter of `max_bytes`; the oldest go beyond that.

    It does not end before its events take as much as its snapshot, or a large core would be written down at each step. One segment
    is always held, so that it may take more than `max_bytes` where a single one does.
    """

    def __init__(self, segment_steps: int, max_bytes: int, on_segment: Callable[[], None] | None = None) -> None:
        """`on_segment`: called when one begins."""
        self._on_segment = on_segment
        self._segment_steps = segment_steps
        self._max_bytes = max_bytes
        self._segments: deque[Segment] = deque()
        self._num_bytes = 0
        self._count = 0

    @property
    def num_bytes(self) -> int:
        """About what all segments take."""
        return self._num_bytes

    @property
    def num_segments(self) -> int:
        """Segments that there ever were."""
        return self._count

    @property
    def is_full(self) -> bool:
        """The newest segment should take no further step."""
        if not self._segments:
            return True
        newest = self._segments[-1]
        most_bytes = max(self._max_bytes // _SEGMENTS_IN_RING, 2 * newest.snapshot.num_bytes)
        return newest.num_steps >= self._segment_steps or newest.num_bytes >= most_bytes

    def begin(self, first_step: int, about: dict[str, Any], snapshot: Snapshot, *, goes_on: bool) -> None:
        """A new segment; what does not fit any more is dropped."""
        goes_on = goes_on and bool(self._segments)
        self._segments.append(Segment(self._count, first_step, about, goes_on, snapshot))
        self._count += 1
        self._grow(snapshot.num_bytes)
        while self._num_bytes > self._max_bytes and len(self._segments) > 1:
            self._num_bytes -= self._segments.popleft().num_bytes
        if self._on_segment is not None:
            self._on_segment()

    def add(self, event: Event, *, num_steps: int = 0) -> None:
        """An event of the newest segment."""
        newest = self._segments[-1]
        newest.events.append(event)
        newest.num_steps += num_steps
        self._grow(event.num_bytes)

    def segments(self, since: int = 0) -> Iterator[Segment]:
        """Those held from number `since` on, the newest as of now."""
        for segment in list(self._segments):
            if segment.number >= since:
                yield segment.as_of_now() if segment is self._segments[-1] else segment

    def place_of(self, step: int) -> tuple[int, int] | None:
        """Number of the segment that a step is in, and how many are held before it; None for a step that is held no more."""
        for position in range(len(self._segments) - 1, -1, -1):
            if self._segments[position].first_step <= step:
                return self._segments[position].number, position
        return None

    def _grow(self, num_bytes: int) -> None:
        self._segments[-1].num_bytes += num_bytes
        self._num_bytes += num_bytes
