"""Log of the last steps, with plan and result, for `quire steps` and WatchScheduler."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from protos.inference.v1 import admin_pb2
from scheduler_svc.observe.step_observer import StepObserver
from scheduler_svc.observe.step_record import StepRecord, Tables
from svc_common.clock import NS_PER_S

MAX_STATES = 256


@dataclass(slots=True)
class StepLog(StepObserver):
    """Records of the last `max_steps` steps, of which it has the block tables too.

    `read_state`: reads the scheduler's state right after a plan. It is called only while a reader wants
    states (`keep_states`); the states of the last `MAX_STATES` steps are kept.
    """

    max_steps: int
    _records: deque[StepRecord] = field(default_factory=deque)
    _base: Tables = field(default_factory=dict)
    _num_closed: int = 0
    _grown: asyncio.Event = field(default_factory=asyncio.Event)
    read_state: Callable[[int], admin_pb2.StepState] | None = None
    _with_state: deque[StepRecord] = field(default_factory=deque)
    _num_state_readers: int = 0

    # --- as an observer -------------------------------------------------------------------------------------------

    def on_announced(self, record: StepRecord) -> None:
        """Keep the current state for the step, if a reader wants it."""
        if self.read_state is None or not self._num_state_readers:
            return
        record.state = self.read_state(record.step)
        self._with_state.append(record)
        if len(self._with_state) > MAX_STATES:
            self._with_state.popleft().state = None

    def on_end(self, record: StepRecord) -> None:
        """Append the step, and drop old ones."""
        self._records.append(record)
        self._num_closed += 1
        while len(self._records) > self.max_steps:
            self._records.popleft().change_tables(self._base)
        self._grown.set()
        self._grown = asyncio.Event()

    # --- reading --------------------------------------------------------------------------------------------------

    @contextmanager
    def keep_states(self) -> Iterator[None]:
        """Keep the state right after each plan made while this context is active."""
        self._num_state_readers += 1
        try:
            yield
        finally:
            self._num_state_readers -= 1

    @property
    def num_dropped(self) -> int:
        """Number of completed steps that are no longer kept."""
        return self._num_closed - len(self._records)

    def output_tokens_per_s(self, now_ns: int, window_s: float) -> float:
        """Tokens sampled per second over the last `window_s` seconds, or over the part of them that the log covers."""
        since_ns, num_tokens = now_ns - int(window_s * NS_PER_S), 0
        for record in reversed(self._records):
            if record.closed_ns < since_ns:
                return num_tokens / window_s
            num_tokens += record.num_sampled
        held_s = max(1e-3, (now_ns - self._records[0].closed_ns) / NS_PER_S) if self.num_dropped else window_s
        return num_tokens / held_s

    def records_from(self, position: int) -> list[StepRecord]:
        """Kept records from the `position`-th completed step on (from 0), oldest first."""
        count = min(self._num_closed - position, len(self._records))
        return list(itertools.islice(reversed(self._records), count))[::-1]

    def oldest_tables(self) -> Tables:
        """Copy of the block tables before the oldest kept step."""
        return {name: list(blocks) for name, blocks in self._base.items()}

    async def wait(self, position: int) -> None:
        """Wait until more than `position` steps have completed."""
        while self._num_closed <= position:
            await self._grown.wait()


class StepReader:
    """Position of one reader in the log. `tables`: rebuild block tables along the way; `state`: include kept states.

    A reader slower than the log skips the steps that the log dropped.
    """

    def __init__(self, log: StepLog, since_step: int, *, tables: bool, state: bool = False) -> None:
        self._log = log
        self._state = state
        self._since_step = since_step
        self._position = log.num_dropped
        self._tables = log.oldest_tables() if tables else None

    def new(self) -> Iterator[admin_pb2.StepReport]:
        """Completed steps that were not read yet, oldest first, as of the call."""
        if self._position < self._log.num_dropped:
            self._position = self._log.num_dropped
            self._tables = self._log.oldest_tables() if self._tables is not None else None
        records = self._log.records_from(self._position)
        self._position += len(records)
        return self._reports(records)

    def _reports(self, records: list[StepRecord]) -> Iterator[admin_pb2.StepReport]:
        for record in records:
            if self._tables is not None:
                record.change_tables(self._tables)
            if record.step >= self._since_step:
                yield record.report(self._tables, state=self._state)

    async def wait(self) -> None:
        """Wait until `new` has something."""
        await self._log.wait(self._position)
