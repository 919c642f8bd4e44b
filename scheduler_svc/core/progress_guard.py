"""Ends livelock: work that is preempted again and again without ever gaining a token (R66, R197, R208).

Outside the recordings: no recorded scheduler has it, and no recording comes near its limits.
"""

from block_manager.cache_rules import CacheRules
from scheduler_svc.core.request import Group

MAX_FRUITLESS = 8
MAX_EMPTY_PLANS = 4


class ProgressGuard:
    """Notices groups that gain nothing and steps that do nothing."""

    def __init__(self) -> None:
        self._num_empty = 0

    def is_stuck(self, group: Group) -> bool:
        """It was preempted too often since its last token."""
        return group.num_fruitless >= MAX_FRUITLESS

    def may_stay(self, group: Group, num_tokens: int, num_lookahead: int, *, alone: bool, cache: CacheRules) -> bool:
        """A stuck group with nobody left to preempt runs on what it really needs, where rules count the worst case."""
        return alone and self.is_stuck(group) and cache.fits_exactly(group.live, num_tokens, num_lookahead)

    def on_plan(self, *, is_empty: bool) -> bool:
        """Counts plans that do nothing although nothing is under way; True when it is time to give somebody up."""
        self._num_empty = self._num_empty + 1 if is_empty else 0
        return self._num_empty >= MAX_EMPTY_PLANS
