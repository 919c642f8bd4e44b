"""Prefix affinity: assign a new task to the rank that has its prompt prefix cached."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from block_manager.cache_rules import CachedSequence
from block_manager.rules.per_rank import PerRankRules


class Draw(NamedTuple):
    """Assignment to `rank`, which has the first `num_tokens` tokens cached; the least busy rank with room has
    `num_least` tasks.
    """

    rank: int
    num_tokens: int
    num_least: int


@dataclass(frozen=True, slots=True)
class PrefixAffinity:
    """Assigns a new task to the rank with the longest cached prefix, among those that are not too busy.

    `slack`: tasks that a rank may have beyond the least busy one with room, so that none idles because another
    has more cached; None: affinity is off. Ties go to the less busy rank, then to the lower number.
    """

    cache: PerRankRules
    slack: int | None

    def draw(self, sequence: CachedSequence, num_owned: Sequence[int], has_room: Sequence[bool]) -> Draw | None:
        """The rank for a sequence; None if no rank with room has any of it cached. `num_owned`, `has_room`: by rank."""
        if self.slack is None or not any(has_room):
            return None
        known = self.cache.known_tokens(sequence)
        with_room = [rank for rank, room in enumerate(has_room) if room]
        if not any(known[rank] for rank in with_room):
            return None
        num_least = min(num_owned[rank] for rank in with_room)
        near = [rank for rank in with_room if num_owned[rank] <= num_least + self.slack]
        rank = max(near, key=lambda rank: (known[rank], -num_owned[rank]))
        return Draw(rank, known[rank], num_least)
