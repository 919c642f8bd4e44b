"""What each tenant was served, in tokens: the account that fairness between tenants goes by.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Whole numbers, so a replay has the
same ones. Who comes next by them is `tenant_queue`'s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler_svc.core.request import Group

OUTPUT_WEIGHT = 2
"""What an output token counts in prompt tokens."""
FIRST_GUESS = 128
_SCALE = 256
_FADING = 8
_MOST_IDLE = 1_024


@dataclass(slots=True)
class Share:
    """One tenant's account. `num_served`: its counter, weighted tokens. `last_turn`: when it was served last, in turns of all.

    `num_open`: groups whose output was charged as foretold, and not as it came. `scaled_length`: of its outputs so far, fading.
    """

    num_served: int = 0
    last_turn: int = 0
    num_open: int = 0
    scaled_length: int = FIRST_GUESS * _SCALE

    def foretold(self, group: Group) -> int:
        """Output tokens that a group of this tenant will likely make, all its sequences together; at least one."""
        each = min(max(1, self.scaled_length // _SCALE), group.request.stop.max_tokens)
        return max(1, each * group.width)

    def learn(self, num_tokens: int, width: int) -> None:
        """An output came to its end."""
        self.scaled_length += (num_tokens // width * _SCALE - self.scaled_length) // _FADING


class TenantShares:
    """Owner of the accounts. A group is charged when it starts: what its prompt has to compute, and output foretold; that is set
    right when it ends. So an account costs nothing while its groups decode, and a preempted group pays once.

    Tenants with nothing to do are remembered up to 1,024, the longest idle is forgotten first.
    """

    def __init__(self) -> None:
        self._shares: dict[str, Share] = {}
        self._num_turns = 0

    def of(self, tenant: str) -> Share:
        """Its account, a new one where there is none."""
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = Share()
        return share

    def lift(self, tenant: str, least: int) -> None:
        """It comes back: what it did not use while it was away is nobody's debt."""
        share = self.of(tenant)
        share.num_served = max(share.num_served, least)

    def charge(self, group: Group) -> None:
        """It starts, for the first time or again."""
        if group.num_charged:
            return
        share = self.of(group.request.tenant)
        first = group.live[0]
        group.num_charged = share.foretold(group)
        share.num_served += first.num_tokens - first.num_computed_tokens + OUTPUT_WEIGHT * group.num_charged
        share.num_open += 1
        self._num_turns += 1
        share.last_turn = self._num_turns

    def charge_masks(self, tenant: str, num_tokens: int) -> None:
        """Its grammars took the time of so many tokens."""
        self.of(tenant).num_served += num_tokens

    def settle(self, group: Group) -> None:
        """It ended: it pays for the output that there was."""
        if not group.num_charged:
            return
        share = self.of(group.request.tenant)
        num_tokens = sum(sequence.num_output_tokens for sequence in group.sequences)
        share.num_served += OUTPUT_WEIGHT * (num_tokens - group.num_charged)
        share.num_open = max(0, share.num_open - 1)
        share.learn(num_tokens, group.width)
        group.num_charged = 0

    def rest(self, tenant: str) -> None:
        """Nobody of it waits any more."""
        self._shares[tenant] = self._shares.pop(tenant, Share())  # now the last to be forgotten

    def forget_idle(self, waiting: Mapping[str, object]) -> None:
        """Drops the accounts of those longest without work, where too many are kept."""
        if len(self._shares) <= 2 * (_MOST_IDLE + len(waiting)):
            return
        idle = [tenant for tenant, share in self._shares.items() if not share.num_open and tenant not in waiting]
        for tenant in idle[: max(0, len(idle) - _MOST_IDLE)]:
            del self._shares[tenant]


class ServiceAccount(Protocol):
    """Who is told of groups that start and end."""

    def started(self, group: Group) -> None:
        """It was given blocks, for the first time or again."""

    def ended(self, group: Group) -> None:
        """Its last sequence came to its end, wherever it stood."""

    def held_up(self, group: Group, num_tokens: int) -> None:
        """Its grammar took time in which so many tokens could have been computed."""

    def passed_over(self, group: Group) -> tuple[Group, int] | None:
        """Who would be served before `group` without fairness, and by how many tokens its tenant is ahead; None: nobody."""

    def owes(self, group: Group, head: Group) -> bool:
        """Whether a group that started comes after the head of the queue, as its tenant was served more."""

    def over_share(self, head: Group, running: Sequence[Group]) -> list[Group]:
        """Those that run of tenants with more than their share of the places, where the tenant of `head` has less than its own."""


class NobodyCounts:
    """Tenants are all the same."""

    def started(self, group: Group) -> None:
        """Nothing."""

    def ended(self, group: Group) -> None:
        """Nothing."""

    def held_up(self, group: Group, num_tokens: int) -> None:
        """Nothing."""

    def passed_over(self, group: Group) -> tuple[Group, int] | None:
        """Nobody."""
        return None

    def owes(self, group: Group, head: Group) -> bool:
        """Never."""
        return False

    def over_share(self, head: Group, running: Sequence[Group]) -> list[Group]:
        """None."""
        return []
