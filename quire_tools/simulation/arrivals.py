"""Arrivals of requests, with what their clients do later."""

from dataclasses import dataclass

from scheduler_svc.core.request import Request


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives at `at_s` of virtual time; its `arrival_time` is set then, on the scheduler's clock.

    `leaves_at_s`: its client cancels it. `stop_string_at`: a stop string is found at that output token of its
    first sequence (counting from 1). `deadline_s`: the service ends it then, unless it is over.
    """

    at_s: float
    request: Request
    leaves_at_s: float | None = None
    stop_string_at: int | None = None
    deadline_s: float | None = None
