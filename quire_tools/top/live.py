"""Read a running scheduler for `quire top` with a few calls per refresh, reconnecting after failures."""

import threading
import time
from dataclasses import replace
from types import TracebackType
from typing import Self

from quire.operators.admin import AdminClient
from quire_tools.top.numbers import Answers, PrefixTally, TopNumbers, numbers_of
from quire_tools.top.states import Source, TopState
from quire_tools.top.steps import StepWindow
from svc_common.clock import wall_ns
from svc_common.errors import DeadlineExceeded, QuireError, ResourceExhausted, Unavailable

_AWAY = (Unavailable, DeadlineExceeded, ResourceExhausted)
_JOIN_S = 1.0
_MOST_LISTED = 500
_NS_PER_S = 1e9


class LiveTopSource:
    """Reads through `client`, which it does not own. Costs the scheduler nothing between two reads."""

    def __init__(self, client: AdminClient) -> None:
        self.title, self.is_live = client.target, True
        self._client = client
        self._window = StepWindow()
        self._prefixes = PrefixTally()
        self._last = TopState()

    def read(self) -> TopState:
        """New numbers, or the last ones with the problem that prevents newer ones; permanent errors are raised."""
        try:
            self._last = self.last()
        except _AWAY as error:
            self._window.forget()
            self._prefixes.forget()
            self._last = replace(self._last, problem=error.message)
        return self._last

    def last(self) -> TopState:
        """The current state; raises Unavailable, without waiting, if the scheduler is not reachable."""
        numbers = self.numbers()
        return TopState(numbers, _clock(numbers.at_ns), read_s=time.monotonic())

    def numbers(self) -> TopNumbers:
        """The current numbers. Raises QuireError."""
        client = self._client
        answers = Answers(wall_ns(), client.load(), client.requests(at_most=_MOST_LISTED), client.workers())
        since = self._window.since(answers.requests.step)
        self._window.take(client.steps(since=since), since=since)
        self._prefixes.take(answers.requests.requests)
        figures = self._window.figures(answers.at_ns)
        return numbers_of(answers, figures, self._prefixes.prefixes(), self._window.policy)


def _clock(unix_ns: int) -> str:
    """Local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(unix_ns / _NS_PER_S))


class SourceReader:
    """Reads a source every `interval_s` seconds on its own thread, so that keys are handled while a call waits.

    Context manager. `state`: the latest one. `error`: what ended the reading. Set `is_paused` to suspend
    reading.
    """

    def __init__(self, source: Source, interval_s: float) -> None:
        self.state = TopState()
        self.error: QuireError | None = None
        self.is_paused = False
        self._source, self._interval_s = source, interval_s
        self._stop = threading.Event()
        self._fresh = threading.Event()
        self._thread = threading.Thread(target=self._run, name="top-reader", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(_JOIN_S)

    def has_news(self) -> bool:
        """True if there was a read since the last call."""
        found = self._fresh.is_set()
        self._fresh.clear()
        return found

    def _run(self) -> None:
        while not self._stop.is_set():
            began_s = time.monotonic()
            if not self.is_paused and not self.state.is_over:
                self._read()
            self._stop.wait(max(0.0, began_s + self._interval_s - time.monotonic()))

    def _read(self) -> None:
        try:
            self.state = self._source.read()
        except QuireError as error:
            self.error = error
            self._stop.set()
        self._fresh.set()
