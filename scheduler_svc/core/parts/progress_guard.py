"""Ends livelock: work that is preempted again and again in the same situation while nobody gains a token (R66, R197, R208).

Outside the recordings: no recorded scheduler has it, and none that ends by itself comes near its limits. One group may well be
preempted a dozen times between two tokens, its own or anybody's, with the situation another each time; that ends by itself.
"""

from collections import Counter
from collections.abc import Iterable

from block_manager.cache_rules import CacheRules
from scheduler_svc.core.request import Group, Place

STUCK = "it could not go on although nothing else was running: it needs more of the cache than there is"
MAX_FRUITLESS = 4
MAX_EMPTY_PLANS = 4

Situation = tuple[tuple[str, int], ...]


class ProgressGuard:
    """Notices preemptions that help nobody and steps that do nothing.

    One stuck group at a time is the *favourite*: until a token is gained or it ends, nobody is started before it or preempts it,
    so that it has everything to itself in the end.
    """

    def __init__(self, max_empty_plans: int | None = MAX_EMPTY_PLANS, why: str = STUCK) -> None:
        """`max_empty_plans` in a row that do nothing are enough to give somebody up; None = never. `why`: what is then said."""
        self.why = why
        self._max_empty_plans = max_empty_plans
        self._num_empty = 0
        self._fruitless: list[Group] = []
        self._situations: Counter[Situation] = Counter()
        self._favourite: Group | None = None

    @property
    def favourite(self) -> Group | None:
        """The stuck group that all others make room for."""
        group = self._favourite
        if group is not None and (group.is_finished or not self.is_stuck(group)):
            self._favourite = None
        return self._favourite

    def on_preempted(self, group: Group, running: Iterable[Group]) -> None:
        """It is about to lose its blocks. `running`: who stays.

        The situation is who has computed how much. As a step follows from the one before, what comes back will come back for ever.
        """
        situation = tuple((s.name, s.num_computed_tokens) for g in (group, *running) for s in g.live)
        self._situations[situation] += 1
        group.num_fruitless = max(group.num_fruitless, self._situations[situation])
        self._fruitless.append(group)
        if self.favourite is None and self.is_stuck(group):
            self._favourite = group

    def on_tokens(self) -> None:
        """Somebody gained a token: the preemptions so far were good for something."""
        for group in self._fruitless:
            group.num_fruitless = 0
        self._fruitless.clear()
        self._situations.clear()

    def next_of(self, queue: Iterable[Group], place: Place) -> Group | None:
        """Who of that queue (its `place`) may start next: the favourite, nobody while it is anywhere else, or the head.

        Swapped groups come back while the favourite waits, as v0 starts no prompts before them.
        """
        favourite = self.favourite
        if favourite is None or (place is Place.SWAPPED and favourite.place is Place.WAITING):
            return next(iter(queue), None)
        return favourite if favourite.place is place else None

    def victims(self, candidates: list[Group]) -> list[Group]:
        """Those who may be preempted for others."""
        return candidates if self.favourite is None else [g for g in candidates if g is not self.favourite]

    def is_stuck(self, group: Group) -> bool:
        """It was preempted too often in the same situation since anybody gained a token."""
        return group.num_fruitless >= MAX_FRUITLESS

    def may_stay(self, group: Group, num_tokens: int, num_lookahead: int, *, alone: bool, cache: CacheRules) -> bool:
        """A stuck group with nobody left to preempt runs on what it really needs, where rules count the worst case."""
        return alone and self.is_stuck(group) and cache.fits_exactly(group.live, num_tokens, num_lookahead)

    def is_hopeless(self, group: Group, *, alone: bool) -> bool:
        """A stuck group that is short of blocks although nobody else runs would only be preempted again, for ever (R197)."""
        return alone and self.is_stuck(group)

    def on_plan(self, *, is_empty: bool) -> bool:
        """Counts plans that do nothing although nothing is under way; True when it is time to give somebody up."""
        self._num_empty = self._num_empty + 1 if is_empty else 0
        return self._max_empty_plans is not None and self._num_empty >= self._max_empty_plans
