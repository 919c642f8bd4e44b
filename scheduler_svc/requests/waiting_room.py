"""The bounded queue's account: how many requests and prompt tokens wait for their first step, and how fast they start."""

from collections import deque

from scheduler_svc.settings import SchedulerSettings
from svc_common.clock import NS_PER_S
from svc_common.errors import ResourceExhausted

_NUM_STARTS = 64


class WaitingRoom:
    """Counts only; the requests themselves are the book's. Bounded by number and by prompt tokens (`settings`)."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._settings = settings
        self._starts: deque[int] = deque(maxlen=_NUM_STARTS)

    def enter(self, num_tokens: int) -> None:
        """A request with that many prompt tokens waits."""
        self.num_requests += 1
        self.num_tokens += num_tokens

    def leave(self, num_tokens: int) -> None:
        """It waits no more."""
        self.num_requests -= 1
        self.num_tokens -= num_tokens

    def started(self, now_ns: int) -> None:
        """One was scheduled: what the rate is measured by."""
        self._starts.append(now_ns)

    def check(self, num_tokens: int, now_ns: int) -> None:
        """ResourceExhausted with a retry time unless there is room. A prompt of any size finds room in an empty queue."""
        limits = self._settings
        fits = self.num_requests == 0 or self.num_tokens + num_tokens <= limits.max_waiting_tokens
        if self.num_requests < limits.max_waiting_requests and fits:
            return
        raise ResourceExhausted(
            f"{self.num_requests} requests with {self.num_tokens} prompt tokens are waiting; the queue takes "
            f"{limits.max_waiting_requests} requests and {limits.max_waiting_tokens} tokens: try again later",
            reason="QUEUE_FULL",
            metadata={"waiting_requests": str(self.num_requests), "waiting_tokens": str(self.num_tokens)},
            retry_after_s=self._retry_after_s(now_ns),
        )

    def _retry_after_s(self, now_ns: int) -> float:
        """Time for a tenth of the queue to start, at the rate of the last starts; between 0.1 and 60 s."""
        if len(self._starts) < 2:
            return 1.0
        span_s = max(1e-3, (now_ns - self._starts[0]) / NS_PER_S)
        return min(60.0, max(0.1, self.num_requests / 10 * span_s / len(self._starts)))
