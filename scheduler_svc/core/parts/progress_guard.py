"""Break livelock: groups preempted again and again in the same situation while no sequence gains a token.

None of the schedulers that Quire reproduces has such a guard, and runs that make progress by themselves stay
below its limits: a group may be preempted a dozen times between two tokens, but each time in another situation.
"""

from collections import Counter
from collections.abc import Iterable

from block_manager.cache_rules import CacheRules
from scheduler_svc.core.request import Group, QueueKind

STUCK = "it could not go on although nothing else was running: it needs more of the cache than there is"
MAX_FRUITLESS = 4
MAX_EMPTY_PLANS = 4

Situation = tuple[tuple[str, int], ...]


class ProgressGuard:
    """Detects fruitless preemptions and steps that do nothing.

    At most one stuck group is the *favourite*: until a token is gained or it ends, no other group starts before
    it or preempts it, so that in the end it has the whole cache to itself.
    """

    def __init__(self, max_empty_plans: int | None = MAX_EMPTY_PLANS, why: str = STUCK) -> None:
        """After `max_empty_plans` empty plans in a row a request is ended with the error `why`; None = never."""
        self.why = why
        self._max_empty_plans = max_empty_plans
        self._num_empty = 0
        self._fruitless: list[Group] = []
        self._situations: Counter[Situation] = Counter()
        self._favourite: Group | None = None

    @property
    def favourite(self) -> Group | None:
        """The stuck group that has precedence over all others; None if there is none."""
        group = self._favourite
        if group is not None and (group.is_finished or not self.is_stuck(group)):
            self._favourite = None
        return self._favourite

    def on_preempted(self, group: Group, running: Iterable[Group]) -> None:
        """Record a preemption. `running`: the groups that stay.

        A situation is the set of sequences with their computed tokens. Each step follows from the one before,
        so a situation that recurs without progress recurs forever.
        """
        situation = tuple((s.name, s.num_computed_tokens) for g in (group, *running) for s in g.live)
        self._situations[situation] += 1
        group.num_fruitless = max(group.num_fruitless, self._situations[situation])
        self._fruitless.append(group)
        if self.favourite is None and self.is_stuck(group):
            self._favourite = group

    def on_tokens(self) -> None:
        """Reset the counters: a sequence gained a token."""
        for group in self._fruitless:
            group.num_fruitless = 0
        self._fruitless.clear()
        self._situations.clear()

    def next_of(self, queue: Iterable[Group], place: QueueKind) -> Group | None:
        """The group of that queue that may start next: the favourite, none if it is in another queue, else the
        head.

        Swapped groups may resume while the favourite is waiting, as v0 starts no prompts before them.
        """
        favourite = self.favourite
        if favourite is None or (place is QueueKind.SWAPPED and favourite.place is QueueKind.WAITING):
            return next(iter(queue), None)
        return favourite if favourite.place is place else None

    def victims(self, candidates: list[Group]) -> list[Group]:
        """The candidates that may be preempted for others."""
        return candidates if self.favourite is None else [g for g in candidates if g is not self.favourite]

    def is_stuck(self, group: Group) -> bool:
        """True if it was preempted MAX_FRUITLESS times in the same situation since any sequence gained a token."""
        return group.num_fruitless >= MAX_FRUITLESS

    def may_stay(self, group: Group, num_tokens: int, num_lookahead: int, *, alone: bool, cache: CacheRules) -> bool:
        """Whether a stuck group with none left to preempt continues on its exact need, where cache rules count a
        worst case.
        """
        return alone and self.is_stuck(group) and cache.fits_exactly(group.live, num_tokens, num_lookahead)

    def is_hopeless(self, group: Group, *, alone: bool) -> bool:
        """True for a stuck group that lacks blocks although no other group runs: it would be preempted forever."""
        return alone and self.is_stuck(group)

    def on_plan(self, *, is_empty: bool) -> bool:
        """Count empty plans while none is in flight; True when a request must be ended."""
        self._num_empty = self._num_empty + 1 if is_empty else 0
        return self._max_empty_plans is not None and self._num_empty >= self._max_empty_plans
