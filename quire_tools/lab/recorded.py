"""The lab's source for a recording: the scheduler's whole state at each step, by replay."""

import asyncio
import bisect
from operator import attrgetter

from gateway_svc.lab.source import RECORDING, About, LabEpisode, Step, Tell, Why
from quire_tools.lab.course import RecordingIndex
from quire_tools.lab.reading import SteppedReplay
from scheduler_svc.observe import timelines
from scheduler_svc.observe.recording.file_format import Recording
from svc_common.errors import ConfigError, NotFound
from svc_common.version import VERSION

_MS_PER_S = 1e3


class RecordedLabSource:
    """A LabSource. Replays the recording once at construction; raises ConfigError if that fails or the recording is empty."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._course = RecordingIndex(recording)
        self._reading: SteppedReplay | None = None
        self._one_at_a_time = asyncio.Lock()
        _check(recording, self._course)

    async def about(self) -> About:
        """See LabSource."""
        return About(RECORDING, self._recording.path.name, VERSION, False, self._course.overview)

    async def steps(self, since: int, limit: int) -> list[Step]:
        """See LabSource; each with its snapshot."""
        async with self._one_at_a_time:
            return await asyncio.to_thread(self._read, since, limit)

    async def follow(self, since: int, tell: Tell) -> None:
        """See LabSource: returns at once, as there are no further steps."""

    async def why(self, request_id: str, tenant: str, *, needs: bool) -> Why:
        """See LabSource; without counterfactuals, for which `quire replay --set` is used."""
        core_id = f"{tenant}:{request_id}" if tenant else request_id
        if core_id not in self._course.timelines:
            raise NotFound(
                f"request {request_id} is not in this recording",
                reason="UNKNOWN_REQUEST",
                resource_type="request",
                resource_name=request_id,
            )
        return Why(core_id, [_episode(episode) for episode in self._course.timelines.episodes(core_id)])

    def _read(self, since: int, limit: int) -> list[Step]:
        first = self._course.overview.step[0]
        since = max(since, first)
        if self._reading is None or not self._reading.can_go_on(since):
            place = bisect.bisect_right(self._course.starts, since, key=attrgetter("first_step"))
            self._reading = SteppedReplay(self._recording, self._course.starts[max(0, place - 1)], since)
        return self._reading.read(since, limit)


def _check(recording: Recording, course: RecordingIndex) -> None:
    found = course.report.first_difference
    if found is not None:
        raise ConfigError(
            f"{recording.path}: step {found.step} cannot be replayed as recorded; `quire replay` says more",
            reason="ALTERED",
        )
    if not course.overview.step:
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
