"""Requests that ended and are kept for readers who come back: how long, and how many."""

from collections import OrderedDict
from collections.abc import Callable

from scheduler_svc.requests.live_request import LiveRequest
from scheduler_svc.settings import SchedulerSettings
from svc_common.clock import NS_PER_S


class Retention:
    """Who is kept, oldest first: for the grace time, with `max_retained_tokens` together. `clock`: monotonic ns.

    Prompts count as well as outputs, and each likeliest token beside an output token as one more.
    """

    def __init__(self, settings: SchedulerSettings, clock: Callable[[], int]) -> None:
        self._settings = settings
        self._clock = clock
        self._kept: OrderedDict[LiveRequest, int] = OrderedDict()
        self._num_tokens = 0

    def __contains__(self, live: LiveRequest) -> bool:
        """Whether it is kept."""
        return live in self._kept

    def keep(self, live: LiveRequest) -> None:
        """It has ended just now."""
        self._kept[live] = _size(live)
        self._num_tokens += self._kept[live]
        self.renew(live)

    def renew(self, live: LiveRequest) -> None:
        """The time of one that is kept begins again."""
        if live in self._kept:
            live.retain_until_ns = self._clock() + int(self._settings.frontend_grace_s * NS_PER_S)
            self._kept.move_to_end(live)

    def drop(self, live: LiveRequest) -> None:
        """It is not kept any more, if it was."""
        self._num_tokens -= self._kept.pop(live, 0)

    def take_expired(self) -> list[LiveRequest]:
        """Those that are not kept any more."""
        now_ns, expired = self._clock(), []
        while self._kept:
            live = next(iter(self._kept))
            if live.retain_until_ns > now_ns and self._num_tokens <= self._settings.max_retained_tokens:
                break
            self.drop(live)
            expired.append(live)
        return expired


def _size(live: LiveRequest) -> int:
    """In tokens."""
    return len(live.submission.prompt) + live.output.num_tokens * (1 + live.submission.num_top_logprobs)
