"""Decides when a service that died is restarted, and when to give up. A pure state machine; time is passed in."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRules:
    """Limits of restarting. Pauses double from `first_pause_s` to `longest_pause_s` with each consecutive death.

    After `max_deaths` consecutive deaths the service is given up; a run of `steady_s` or more resets the
    count. `max_deaths` exceeds the scheduler's `max_worker_losses`, the number of deaths after which it
    identifies a request that crashes workers, so that one poison request does not end the whole stack.
    """

    max_deaths: int = 8
    steady_s: float = 60.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 1.0

    def pause_s(self, num_deaths: int) -> float:
        """Pause before the restart that follows consecutive death number `num_deaths`."""
        return float(min(self.longest_pause_s, self.first_pause_s * 2.0 ** (num_deaths - 1)))


@dataclass(slots=True)
class _Account:
    """One service: start of its current run, consecutive deaths, and when it is due for restart (None while it runs)."""

    started_s: float
    num_deaths: int = 0
    due_s: float | None = None


class Restarts:
    """Tracks each service by name. Times are seconds of one monotonic clock."""

    def __init__(self, rules: RestartRules) -> None:
        self.rules = rules
        self._accounts: dict[str, _Account] = {}

    def started(self, name: str, now_s: float) -> None:
        """Note that the service was started."""
        account = self._accounts.setdefault(name, _Account(now_s))
        account.started_s, account.due_s = now_s, None

    def is_waiting(self, name: str) -> bool:
        """True if the service is dead and scheduled for restart."""
        return self._accounts[name].due_s is not None

    def died(self, name: str, now_s: float) -> float | None:
        """Note a death; returns seconds until the restart, or None if the service is given up."""
        account = self._accounts[name]
        if now_s - account.started_s >= self.rules.steady_s:
            account.num_deaths = 0
        account.num_deaths += 1
        if account.num_deaths >= self.rules.max_deaths:
            return None
        pause_s = self.rules.pause_s(account.num_deaths)
        account.due_s = now_s + pause_s
        return pause_s

    def due(self, now_s: float) -> list[str]:
        """Names of the services to restart now."""
        return [
            name for name, account in self._accounts.items() if account.due_s is not None and now_s >= account.due_s
        ]
