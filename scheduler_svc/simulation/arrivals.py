"""Who comes when, and what clients do afterwards."""

from dataclasses import dataclass

from scheduler_svc.core.request import Request


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes at `at_s` of virtual time; its `arrival_time` is set then, on the scheduler's clock.

    `leaves_at_s`: its client goes away. `stop_string_at`: a stop string is found in output token number `stop_string_at` of its
    first sequence (counting from 1). `deadline_s`: it is ended then by the shell, unless it is over.
    """

    at_s: float
    request: Request
    leaves_at_s: float | None = None
    stop_string_at: int | None = None
    deadline_s: float | None = None
