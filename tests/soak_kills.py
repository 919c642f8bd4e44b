"""The part of the soak that kills the scheduler of a real stack, so often for each seed; all is compared with a run without."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.support.stack import kill_requests, scheduler_kills
from tests.support.stack.supervised import supervised

KILLS_PER_SEED = 10


@dataclass
class KillSums:
    """What all runs did. `violations`: 1 = its last seed ended the last run. `next_seed`: where the next run begins."""

    next_seed: int = 1_000_000
    kills: int = 0
    requests: int = 0
    tokens: int = 0
    violations: int = 0
    seconds: float = 0.0

    def add(self, done: scheduler_kills.Survived) -> None:
        """One more seed."""
        self.next_seed += 1
        self.kills += done.kills
        self.requests += done.requests
        self.tokens += done.tokens
        self.seconds = round(self.seconds + done.seconds, 3)


def kill_on(so_far: KillSums, rounds: Iterable[int]) -> Iterator[scheduler_kills.Survived]:
    """One seed for each of `rounds`, all on one stack; what it did, which counts by then. Raises where a promise was broken."""
    so_far.violations = 1
    with supervised(**scheduler_kills.OPTIONS) as running:
        address = running.stack.grpc_address
        wanted = scheduler_kills.cases(address)
        expected = kill_requests.undisturbed(address, wanted)
        for _ in rounds:
            done = scheduler_kills.survive(running, wanted, expected, KILLS_PER_SEED, so_far.next_seed)
            so_far.add(done)
            yield done
    so_far.violations = 0
