"""Retention of ended resumable requests for readers that reconnect, bounded by time and tokens."""

from collections import OrderedDict
from collections.abc import Callable

from scheduler_svc.requests.live_request import LiveRequest
from scheduler_svc.settings import SchedulerSettings
from svc_common.clock import NS_PER_S


class Retention:
    """Retained requests, oldest first: each for `frontend_grace_s`, together at most `max_retained_tokens`. `clock`: monotonic ns.

    A request counts its prompt and output tokens, plus one for each top log probability beside an output
    token.
    """

    def __init__(self, settings: SchedulerSettings, clock: Callable[[], int]) -> None:
        self._settings = settings
        self._clock = clock
        self._kept: OrderedDict[LiveRequest, int] = OrderedDict()
        self._num_tokens = 0

    def __contains__(self, live: LiveRequest) -> bool:
        """True if the request is retained."""
        return live in self._kept

    def keep(self, live: LiveRequest) -> None:
        """Retain a request that has just ended."""
        self._kept[live] = _size(live)
        self._num_tokens += self._kept[live]
        self.renew(live)

    def renew(self, live: LiveRequest) -> None:
        """Restart the grace time of a retained request. No-op for others."""
        if live in self._kept:
            live.retain_until_ns = self._clock() + int(self._settings.frontend_grace_s * NS_PER_S)
            self._kept.move_to_end(live)

    def drop(self, live: LiveRequest) -> None:
        """Stop retaining a request. No-op if it is not retained."""
        self._num_tokens -= self._kept.pop(live, 0)

    def take_expired(self) -> list[LiveRequest]:
        """Drop and return requests that are past their time or exceed the token limit, oldest first."""
        now_ns, expired = self._clock(), []
        while self._kept:
            live = next(iter(self._kept))
            if live.retain_until_ns > now_ns and self._num_tokens <= self._settings.max_retained_tokens:
                break
            self.drop(live)
            expired.append(live)
        return expired


def _size(live: LiveRequest) -> int:
    """Size in tokens."""
    return len(live.submission.prompt) + live.output.num_tokens * (1 + live.submission.num_top_logprobs)
