"""Workloads of the policy comparison as recordings: written in virtual time, and read to predict other policies.

The files are those of `quire record`: `quire replay` reads them, and predictions work for any recording of
its.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.policies import runs
from benchmarks.policies.runs import Comparison, Load, Source
from quire_tools.replay.what_if import WhatIf, one_life, what_if
from quire_tools.simulation.cost_model import GPU
from quire_tools.simulation.events import EventQueue
from quire_tools.simulation.history import SimulationHistory
from quire_tools.simulation.link import Link
from quire_tools.simulation.workloads import WORKLOADS, Workload
from scheduler_svc.observe.recording.file_format import Recording, RecordingWriter
from scheduler_svc.observe.recording.record_buffer import RecordBuffer
from scheduler_svc.observe.recording.segment_buffer import RecordingSegment
from svc_common.errors import ConfigError

SUFFIX = ".rec"
_SEGMENT_STEPS = 1_000
_MAX_BYTES = 2**34


def write(path: Path, policy: str, workload: Workload, load: Load) -> SimulationHistory:
    """Serve the workload under the policy and record the whole run; equal workloads give equal bytes.

    Tokens are stored verbatim, since they are synthetic. The file begins after the first request has arrived.
    """
    record_buffer = RecordBuffer(_SEGMENT_STEPS, _MAX_BYTES, verbatim=True)
    line = _Line()
    core = record_buffer.record(runs.build(policy, load), line.now, {"workload": workload.name, "seed": workload.seed})
    core.observe_costs(GPU.costs)
    history = runs.simulate(core, workload, connect=line).run()
    _save(path, record_buffer)
    return history


def _save(path: Path, record_buffer: RecordBuffer) -> None:
    segments = record_buffer.segments()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        writer = RecordingWriter(file)
        writer.write(record_buffer.beginning())
        for packed in record_buffer.pack(segments):
            writer.write(packed.frame)
        writer.finish(num_segments=len(segments), num_steps=sum(segment.num_steps for segment in segments))


class _Line:
    """Connects a simulation to the recorder, which is created before the simulation's clock and then uses it."""

    def __init__(self) -> None:
        self._events = EventQueue()

    def now(self) -> float:
        """Seconds of virtual time."""
        return self._events.now

    def __call__(self, events: EventQueue, *parts: Any, **more: Any) -> Link:
        """See `Simulation`: `connect`."""
        self._events = events
        return Link(events, *parts, **more)


# --- reading ----------------------------------------------------------------------------------------------------------


def found(folder: Path) -> dict[str, Path]:
    """Recordings in a folder by workload: known ones in their order, then others by name. ConfigError if there are none."""
    paths = {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}
    if not paths:
        raise ConfigError(
            f"{folder} contains no *{SUFFIX} files; make some with --record {folder}", reason="NO_RECORDINGS"
        )
    return {name: paths[name] for name in [*(kind for kind in WORKLOADS if kind in paths), *paths]}


def predict(path: Path, policies: Iterable[str], tick: Callable[[], None]) -> Comparison:
    """Predict each policy's run of a recording, by `what_if`; `tick` after each. Raises ConfigError for a bad recording."""
    segments = one_life(Recording(path).segments())
    whats = {}
    for policy in policies:
        whats[policy] = what_if(segments, policy, [])
        tick()
    runs = {policy: what.predicted for policy, what in whats.items()}
    first = next(iter(whats.values()))
    return Comparison(_load(segments[0], first), runs, _source(path, segments[0], first))


def _source(path: Path, segment: RecordingSegment, what: WhatIf) -> Source:
    return Source(path.name, segment.about["spec"]["name"], what.recorded.figures(), what.fit)


def _load(segment: RecordingSegment, what: WhatIf) -> Load:
    """The recorded load: requests per second from the first to the last."""
    times = [r.arrival_s for r in what.recorded.requests.values()]
    length_s = max(times) - min(times) if times else 0.0
    rate = (len(times) - 1) / length_s if length_s else 0.0
    return Load(rate, segment.about["limits"]["num_gpu_blocks"], len(times))
