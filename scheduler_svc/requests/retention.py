"""Requests that ended and are kept for readers who come back: how long, and how many."""

from collections import OrderedDict
from collections.abc import Callable

from scheduler_svc.requests.live_request import LiveRequest
from scheduler_svc.settings import SchedulerSettings
from svc_common.clock import NS_PER_S


class Retention:
    """Who is kept, oldest first: for the grace time, with `max_retained_tokens` of output together. `clock`: monotonic ns."""

    def __init__(self, settings: SchedulerSettings, clock: Callable[[], int]) -> None:
        self._settings = settings
        self._clock = clock
        self._kept: OrderedDict[tuple[str, str], LiveRequest] = OrderedDict()
        self._num_tokens = 0

    def __contains__(self, key: tuple[str, str]) -> bool:
        """Whether the request of that public key is kept."""
        return key in self._kept

    def keep(self, live: LiveRequest) -> None:
        """It has ended just now."""
        live.retain_until_ns = self._clock() + int(self._settings.frontend_grace_s * NS_PER_S)
        self._kept[live.submission.key] = live
        self._num_tokens += live.output.num_tokens

    def take_expired(self) -> list[LiveRequest]:
        """Those that are not kept any more."""
        now_ns, expired = self._clock(), []
        while self._kept:
            live = next(iter(self._kept.values()))
            if live.retain_until_ns > now_ns and self._num_tokens <= self._settings.max_retained_tokens:
                break
            del self._kept[live.submission.key]
            self._num_tokens -= live.output.num_tokens
            expired.append(live)
        return expired
