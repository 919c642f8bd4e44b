"""A recording as a source for `quire top`: replays it and shows it at regular intervals of recorded time."""

import time
from collections import Counter
from collections.abc import Iterator

from block_manager.pool import PoolCounts
from quire_tools.lab.running import RunningReplay, lab_step
from quire_tools.top.numbers import PoolNumbers, Prefixes, TopNumbers, row_of, waits_of
from quire_tools.top.states import TopState
from quire_tools.top.steps import StepWindow
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.recording.events import Event
from scheduler_svc.observe.recording.file_format import Recording
from scheduler_svc.observe.step_record import StepRecord

_NS_PER_S, _MS_PER_S = 1_000_000_000, 1e3


class RecordedTopSource:
    """Reads a recording in steps of `interval_s` recorded seconds, starting at its first plan."""

    def __init__(self, recording: Recording, interval_s: float) -> None:
        self.title, self.is_live = f"{recording.path.name} (recording)", False
        self._replay = _TopReplay()
        self._events = _Events(self._replay.replayer.run(recording.segments(), until_step=0))
        self._began_s = self._until_s = self._events.next_s
        self._interval_s = interval_s

    def read(self) -> TopState:
        """The next state; at the end of the recording, its last state again."""
        replayer = self._replay.replayer
        replayer.go_on(self._events.until(self._until_s))
        at_s = min(self._until_s, max(replayer.now, self._began_s))
        self._until_s += self._interval_s
        core = self._replay.core
        numbers = None if core is None else self._replay.numbers(core, at_s)
        found = replayer.report.first_difference
        problem = "" if found is None else f"step {found.step} cannot be replayed as recorded; `quire replay` says more"
        is_over = found is not None or self._events.are_over
        return TopState(numbers, f"+{at_s - self._began_s:.1f} s", problem, time.monotonic(), is_over)

    def last(self) -> TopState:
        """The state at the end of the recording."""
        self._until_s = float("inf")
        return self.read()


class _Events:
    """Events up to a given time. `next_s`: recorded time of the next event."""

    def __init__(self, events: Iterator[Event]) -> None:
        self._events = events
        self._next = next(events, None)

    @property
    def next_s(self) -> float:
        """0 if there are no further events."""
        return self._next.at if self._next is not None else 0.0

    @property
    def are_over(self) -> bool:
        """True if there are no further events."""
        return self._next is None

    def until(self, at_s: float) -> Iterator[Event]:
        """The events up to `at_s`, in order."""
        while self._next is not None and self._next.at <= at_s:
            event = self._next
            yield event
            self._next = next(self._events, None)


class _TopReplay(RunningReplay):
    """A replay that keeps the window of steps, and reads the core when numbers are requested."""

    def __init__(self) -> None:
        super().__init__()
        self._window = StepWindow()

    def on_end(self, record: StepRecord) -> None:
        """Add the step to the window."""
        self._window.add(lab_step(record))

    # --- looking -----------------------------------------------------------------------------------------------------

    def numbers(self, core: Scheduler, at_s: float) -> TopNumbers:
        """The numbers at recorded time `at_s`."""
        at_ns = int(at_s * _NS_PER_S)
        requests = self.requests()
        rows = tuple(row_of(request, at_s * _MS_PER_S) for request in requests)
        counts = Counter((row.queue, row.reason) for row in rows)
        figures = self._window.figures(at_ns)
        waiting, running, swapped = core.queue_lengths
        gpu, cpu = core.pool_counts
        fresh = [request for request in requests if request.started_ms is None]
        started = [request for request in requests if request.started_ms is not None]
        return TopNumbers(
            at_ns=at_ns,
            serving=True,
            draining=False,
            policy=core.policy,
            step=core.step,
            waiting=waiting,
            running=running,
            swapped=swapped,
            never_scheduled=len(fresh),
            max_waiting=None,
            waiting_tokens=sum(row.prompt_tokens for row in fresh),
            output_tokens_per_s=figures.output_tokens_per_s,
            starts_per_s=None,
            waits=waits_of(((queue, reason, count) for (queue, reason), count in counts.items()), rows),
            pools=tuple(_pool(tier, pool) for tier, pool in (("device", gpu), ("host", cpu)) if pool.total),
            prefixes=Prefixes(
                len(started), sum(r.prompt_tokens for r in started), sum(r.cached_prompt_tokens for r in started)
            ),
            steps=figures,
            workers=(),
            tenants=(),
            requests=rows,
            num_left_out=0,
        )


def _pool(tier: str, counts: PoolCounts) -> PoolNumbers:
    return PoolNumbers(tier, counts.total, counts.total - counts.free, counts.cached, counts.free - counts.cached)
