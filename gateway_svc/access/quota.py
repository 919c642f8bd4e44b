"""Rate limits and quotas of one tenant in this gateway process: calls per second, concurrent requests, tokens per minute."""

import time
from collections.abc import Callable

from gateway_svc.access.tenants_file import TenantLimits
from gateway_svc.requests.engine_request import EngineRequest
from protos.engine.v1 import engine_pb2
from svc_common.errors import QuotaViolation, ResourceExhausted
from svc_common.token_bucket import TokenBucket

_SECONDS_PER_MINUTE = 60.0
_FIRST_GUESS_S = 1.0
_NEWEST_COUNTS = 0.1
_LEAST_WAIT_S = 0.05
_LONGEST_WAIT_S = 60.0


class TenantQuota:
    """Buckets and counts of one tenant, kept over changes of its limits. Call only on the event loop's thread."""

    def __init__(self, tenant: str, limits: TenantLimits, now: Callable[[], float] = time.monotonic) -> None:
        self._tenant = tenant
        self._now = now
        self._limits = limits
        self._request_s = _FIRST_GUESS_S
        self._calls: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.num_running = 0
        self.change(limits)

    def change(self, limits: TenantLimits) -> None:
        """Change the limits; running requests go on and debts stay."""
        self._limits = limits
        per_minute = limits.tokens_per_min
        per_token_s = None if per_minute is None else per_minute / _SECONDS_PER_MINUTE
        self._calls = self._changed(self._calls, limits.requests_per_s, limits.burst_or_default)
        self._tokens = self._changed(self._tokens, per_token_s, float(per_minute or 0))

    def _changed(self, bucket: TokenBucket | None, rate_per_s: float | None, capacity: float) -> TokenBucket | None:
        if rate_per_s is None:
            return None
        if bucket is None:
            return TokenBucket(rate_per_s, capacity, self._now)
        bucket.change(rate_per_s, capacity)
        return bucket

    @property
    def num_tokens_left(self) -> float | None:
        """Tokens that may be used now without waiting; None = no limit."""
        return None if self._tokens is None else self._tokens.level

    def count_call(self) -> None:
        """Count one call. Raises ResourceExhausted with the time until the next is allowed."""
        if self._calls is None:
            return
        if wait_s := self._calls.wait_s(1):
            raise self._refusal(f"requests_per_s = {self._limits.requests_per_s:g}", wait_s)
        self._calls.take(1)

    def begin_request(self) -> float:
        """Count one running request, until `end_request` with the returned time. Raises ResourceExhausted."""
        most = self._limits.concurrent_requests
        if most is not None and self.num_running >= most:
            raise self._refusal(f"concurrent_requests = {most}", self._request_s / most)
        self.num_running += 1
        return self._now()

    def end_request(self, begin_s: float) -> None:
        """End the request that began at that time."""
        self.num_running -= 1
        self._request_s += _NEWEST_COUNTS * (self._now() - begin_s - self._request_s)

    def take_tokens(self, num_tokens: int) -> None:
        """Take the tokens that a request may cost. Raises ResourceExhausted with a retry time."""
        if self._tokens is None:
            return
        if wait_s := self._tokens.wait_s(num_tokens):
            raise self._refusal(f"tokens_per_min = {self._limits.tokens_per_min}", wait_s)
        self._tokens.take(num_tokens)

    def give_tokens_back(self, num_tokens: int) -> None:
        """Return tokens that a request did not cost; a negative number charges more."""
        if self._tokens is not None:
            self._tokens.take(-num_tokens)

    def _refusal(self, limit: str, wait_s: float) -> ResourceExhausted:
        return ResourceExhausted(
            f"the quota of tenant {self._tenant} is used up: {limit}; try again later, or ask the operator for more",
            reason="TENANT_QUOTA",
            metadata={"tenant": self._tenant, "limit": limit.partition(" ")[0]},
            retry_after_s=min(_LONGEST_WAIT_S, max(_LEAST_WAIT_S, wait_s)),
            quota=QuotaViolation(f"tenant:{self._tenant}", limit),
        )


def estimated_tokens(submit: engine_pb2.Submit) -> int:
    """Most tokens that a request can cost: its prompt, and the maximum output of each of its sequences."""
    prompt, num_sequences = len(submit.token_ids) // 4, max(1, submit.num_choices, submit.best_of)
    return prompt + submit.stop.max_tokens * num_sequences


def used_tokens(request: EngineRequest) -> int:
    """Tokens that a request cost, once this gateway is done with it.

    0 if it never started, or if another call submitted it and was charged. The maximum if it goes on without
    a reader. Sequences that are not returned count as much as those that are.
    """
    if request.was_attached or not (request.was_started or request.num_received_tokens):
        return 0
    if request.submit.resumable and not request.is_over:
        return estimated_tokens(request.submit)
    num_sequences = max(request.num_choices, request.submit.best_of)
    return request.num_prompt_tokens + request.num_output_tokens * num_sequences // request.num_choices
