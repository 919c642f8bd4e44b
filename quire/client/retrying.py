"""When and where a client retries. Only decides; waiting is left to the code that calls it.

Retries never generate twice: a repeated request with an idempotency key attaches to the running one, and a
partly read stream is continued with `Resume`.
"""

import random
import time
from dataclasses import dataclass
from typing import Any

from quire.client.connections import Gateways
from svc_common.errors import QuireError, ResourceExhausted, Unavailable

# Reasons that a gateway gives about itself, or that the transport reports. Other answers are final: the
# gateway may already have waited long before sending them.
_GATEWAY_GONE = frozenset({"UNAVAILABLE", "CONNECT_FAILED", "DRAINING"})
_TOO_MUCH = frozenset({"TENANT_QUOTA", "QUEUE_FULL"})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of retrying. `max_attempts` counts the first attempt, each at all gateways; pauses double from `first_pause_s`.

    A retry time sent by the server replaces the pause; if it exceeds `max_pause_s`, the client gives up.
    """

    max_attempts: int = 3
    first_pause_s: float = 0.1
    max_pause_s: float = 10.0

    def pause_s(self, error: QuireError, attempt: int) -> float | None:
        """Seconds to wait after the failed `attempt` (counted from 1); None = give up."""
        if attempt >= self.max_attempts or not _is_passing(error):
            return None
        if error.retry_after_s is not None:
            return error.retry_after_s if error.retry_after_s <= self.max_pause_s else None
        longest_s: float = min(self.max_pause_s, self.first_pause_s * 2 ** (attempt - 1))
        return longest_s * random.uniform(0.5, 1.0)


NO_RETRIES = RetryPolicy(max_attempts=1)


def _is_passing(error: QuireError) -> bool:
    """True if the same call may succeed a little later."""
    return moves_on(error) or (isinstance(error, ResourceExhausted) and error.reason in _TOO_MUCH)


def moves_on(error: QuireError) -> bool:
    """True if this gateway is unreachable or draining, so that the next attempt goes to another."""
    return isinstance(error, Unavailable) and error.reason in _GATEWAY_GONE


class Attempts:
    """Attempts of one call across gateways until its deadline. `timeout_s` None = no deadline.

    An unavailable gateway costs neither an attempt nor a pause while there is another that has not been
    tried.
    """

    def __init__(self, gateways: Gateways, policy: RetryPolicy, timeout_s: float | None) -> None:
        self._gateways = gateways
        self._policy = policy
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._number = 1
        self._gone: set[str] = set()
        self.target = gateways.target

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline, never below 0; None = no deadline."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    @property
    def stub(self) -> Any:
        """InferenceService stub of `target`."""
        return self._gateways.stub(self.target)

    def begin(self) -> str:
        """Start an attempt; return the address of its gateway."""
        self.target = self._gateways.target
        return self.target

    def succeeded(self) -> None:
        """Reset the counts of failures: data was received."""
        self._number = 1
        self._gone.clear()

    def pause_s(self, error: QuireError) -> float | None:
        """Seconds to wait before the next attempt; None = give up."""
        is_free = moves_on(error) and self._moved_on()
        pause_s, remaining_s = 0.0 if is_free else self._counted(error), self.remaining_s
        too_late = pause_s is not None and remaining_s is not None and pause_s >= remaining_s
        return None if too_late else pause_s

    def _moved_on(self) -> bool:
        """Switch gateways; True if the next one has not been tried since all had failed."""
        self._gateways.leave(self.target)
        is_first_time = self.target not in self._gone
        self._gone.add(self.target)
        return is_first_time and len(self._gone) < len(self._gateways.targets) and self._policy.max_attempts > 1

    def _counted(self, error: QuireError) -> float | None:
        self._gone.clear()
        pause_s = self._policy.pause_s(error, self._number)
        self._number += 1
        return pause_s
