"""When a service that died is started again, and when that is given up. A pure state machine; time is passed in."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRules:
    """Pauses double from `first_pause_s` up to `longest_pause_s` with each death in a row; `max_deaths` in a row are the end.

    In a row: a life of `steady_s` or more clears the account. `max_deaths` is more than the deaths by which the scheduler finds out
    the request that kills its workers (its `max_worker_losses`), so one poison request does not end everything.
    """

    max_deaths: int = 8
    steady_s: float = 60.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 1.0

    def pause_s(self, num_deaths: int) -> float:
        """Between the death that is number `num_deaths` in a row and the next start."""
        return float(min(self.longest_pause_s, self.first_pause_s * 2.0 ** (num_deaths - 1)))


@dataclass(slots=True)
class _Account:
    """One service: since when it lives, deaths in a row, and when it is started again (None: it lives)."""

    started_s: float
    num_deaths: int = 0
    due_s: float | None = None


class Restarts:
    """Owner of the account of each service, by name. Times are of one monotonic clock, in seconds."""

    def __init__(self, rules: RestartRules) -> None:
        self.rules = rules
        self._accounts: dict[str, _Account] = {}

    def started(self, name: str, now_s: float) -> None:
        """A life begins."""
        account = self._accounts.setdefault(name, _Account(now_s))
        account.started_s, account.due_s = now_s, None

    def is_waiting(self, name: str) -> bool:
        """Dead, known to be, and to be started again."""
        return self._accounts[name].due_s is not None

    def died(self, name: str, now_s: float) -> float | None:
        """A life ended: seconds until the next one begins, or None where there is to be none."""
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
        """Who is to be started now."""
        return [
            name for name, account in self._accounts.items() if account.due_s is not None and now_s >= account.due_s
        ]
