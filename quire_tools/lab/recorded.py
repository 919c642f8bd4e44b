"""The lab's source for a recording: the scheduler's whole state at each step, by replay."""

import asyncio
import bisect
import itertools
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

from gateway_svc.lab.source import RECORDING, About, LabEpisode, LabSnapshot, Step, Tell, Why
from gateway_svc.lab.tables import TableChanges, Tables
from quire_tools.lab.recording_index import RecordingIndex, ReplayStart
from quire_tools.lab.running import RunningReplay, lab_step
from scheduler_svc.observe import timelines
from scheduler_svc.observe.recording.events import Event
from scheduler_svc.observe.recording.file_format import Recording
from scheduler_svc.observe.step_record import StepRecord
from svc_common.errors import ConfigError, NotFound
from svc_common.version import VERSION

_MOST_KEPT = 400
_NEAR = 100
_MS_PER_S = 1e3


class RecordedLabSource:
    """A LabSource. Replays the recording once at construction; raises ConfigError if that fails or the recording is empty."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._index = RecordingIndex(recording)
        self._reading: _SteppedReplay | None = None
        self._one_at_a_time = asyncio.Lock()
        _check(recording, self._index)

    async def about(self) -> About:
        """See LabSource."""
        return About(RECORDING, self._recording.path.name, VERSION, False, self._index.overview)

    async def steps(self, since: int, limit: int) -> list[Step]:
        """See LabSource; each with its snapshot."""
        async with self._one_at_a_time:
            return await asyncio.to_thread(self._read, since, limit)

    async def follow(self, since: int, tell: Tell) -> None:
        """See LabSource: returns at once, as there are no further steps."""

    async def why(self, request_id: str, tenant: str, *, needs: bool) -> Why:
        """See LabSource; without counterfactuals, for which `quire replay --set` is used."""
        core_id = f"{tenant}:{request_id}" if tenant else request_id
        if core_id not in self._index.timelines:
            raise NotFound(
                f"request {request_id} is not in this recording",
                reason="UNKNOWN_REQUEST",
                resource_type="request",
                resource_name=request_id,
            )
        return Why(core_id, [_episode(episode) for episode in self._index.timelines.episodes(core_id)])

    def _read(self, since: int, limit: int) -> list[Step]:
        first = self._index.overview.step[0]
        since = max(since, first)
        if self._reading is None or not self._reading.can_go_on(since):
            place = bisect.bisect_right(self._index.starts, since, key=attrgetter("first_step"))
            self._reading = _SteppedReplay(self._recording, self._index.starts[max(0, place - 1)], since)
        return self._reading.read(since, limit)


class _SteppedReplay(RunningReplay):
    """A replay from the segment of `start`, kept for further reads. Owns the steps that it saw from `since` on, with the
    snapshot and the block tables right after their plans.
    """

    def __init__(self, recording: Recording, start: ReplayStart, since: int) -> None:
        super().__init__(start.reasons.copy())
        self._steps: dict[int, tuple[StepRecord, LabSnapshot, Tables]] = {}
        self._since = self._next = since
        self._rest: Iterator[Event] = self.replayer.run(recording.segments(start.segment), until_step=since)

    def can_go_on(self, since: int) -> bool:
        """True if step `since` is among those kept, or just ahead."""
        return self._since <= since <= self._next + _NEAR

    def read(self, since: int, limit: int) -> list[Step]:
        """Up to `limit` steps from `since` on, oldest first; the first has complete tables."""
        while self._num_done(since) < limit:
            if (event := next(self._rest, None)) is None:
                self.replayer.close()
                break
            self.replayer.go_on(iter((event,)))
        wanted = sorted(step for step in self._steps if step >= since)[:limit]
        changes = TableChanges()
        found = [
            replace(lab_step(record), tables=changes.to(tables), snapshot=snapshot)
            for record, snapshot, tables in map(self._steps.__getitem__, wanted)
        ]
        self._next = max(self._next, wanted[-1] + 1) if wanted else self._next
        self._drop_old()
        return found

    def _num_done(self, since: int) -> int:
        kept = (record for record, _, _ in self._steps.values() if record.step >= since)
        return sum(1 for _ in itertools.takewhile(attrgetter("is_closed"), kept))

    def _drop_old(self) -> None:
        for step in sorted(self._steps)[:-_MOST_KEPT]:
            del self._steps[step]
            self._since = step + 1

    # --- what happens ------------------------------------------------------------------------------------------------

    def on_announced(self, record: StepRecord) -> None:
        """Keep the step, unless it is before `since`."""
        if record.step >= self._since:
            assert self.core is not None
            self._steps[record.step] = record, self.snapshot(record.step), self.core.block_tables()


def _check(recording: Recording, index: RecordingIndex) -> None:
    found = index.report.first_difference
    if found is not None:
        raise ConfigError(
            f"{recording.path}: step {found.step} cannot be replayed as recorded; `quire replay` says more",
            reason="ALTERED",
        )
    if not index.overview.step:
        raise ConfigError(f"{recording.path} has no steps", reason="EMPTY")


def _episode(episode: timelines.WaitEpisode) -> LabEpisode:
    return LabEpisode(
        from_step=episode.from_step,
        to_step=episode.to_step,
        from_ms=episode.from_time * _MS_PER_S,
        to_ms=None if episode.to_time is None else episode.to_time * _MS_PER_S,
        queue=episode.queue,
        reason=episode.reason.value,
        numbers=dict(episode.numbers),
        sample=episode.sample,
        needs={},
    )
