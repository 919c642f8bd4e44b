"""Tokens served per tenant: the account behind fairness between tenants.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Integers, so that
a replay gets the same values. `fair_queue` orders tenants by them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler_svc.core.request import Group

OUTPUT_WEIGHT = 2
"""Weight of an output token relative to a prompt token."""
FIRST_GUESS = 128
_SCALE = 256
_FADING = 8
_MOST_IDLE = 1_024


@dataclass(slots=True)
class TenantAccount:
    """One tenant's account. `num_served`: weighted tokens served. `last_turn`: sequence number of its last charge.

    `num_open`: groups charged by forecast and not yet corrected. `scaled_length`: moving average of its output
    lengths times `_SCALE`.
    """

    num_served: int = 0
    last_turn: int = 0
    num_open: int = 0
    scaled_length: int = FIRST_GUESS * _SCALE

    def foretold(self, group: Group) -> int:
        """Forecast output tokens of a group of this tenant, all sequences together; at least one."""
        each = min(max(1, self.scaled_length // _SCALE), group.request.stop.max_tokens)
        return max(1, each * group.width)

    def learn(self, num_tokens: int, width: int) -> None:
        """Update the average with a finished output."""
        self.scaled_length += (num_tokens // width * _SCALE - self.scaled_length) // _FADING


class TenantShares:
    """Owner of the accounts. A group is charged when it starts, for the prompt tokens to compute and the forecast
    output.

    The charge is corrected when it ends. So an account costs nothing while its groups decode, and a preempted
    group pays once. Up to 1,024 idle tenants are remembered; the longest idle is dropped first.
    """

    def __init__(self) -> None:
        self._shares: dict[str, TenantAccount] = {}
        self._num_turns = 0

    def of(self, tenant: str) -> TenantAccount:
        """The tenant's account, created if there is none."""
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = TenantAccount()
        return share

    def lift(self, tenant: str, least: int) -> None:
        """Raise a returning tenant's counter to `least`, so that idle time earns no further credit."""
        share = self.of(tenant)
        share.num_served = max(share.num_served, least)

    def charge(self, group: Group) -> None:
        """Charge a group that starts; no-op if it was charged before."""
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
        """Charge mask time, as an equivalent number of tokens."""
        self.of(tenant).num_served += num_tokens

    def settle(self, group: Group) -> None:
        """Correct the charge of a group that ended to its actual output."""
        if not group.num_charged:
            return
        share = self.of(group.request.tenant)
        num_tokens = sum(sequence.num_output_tokens for sequence in group.sequences)
        share.num_served += OUTPUT_WEIGHT * (num_tokens - group.num_charged)
        share.num_open = max(0, share.num_open - 1)
        share.learn(num_tokens, group.width)
        group.num_charged = 0

    def rest(self, tenant: str) -> None:
        """Note that the tenant has no waiting requests any more."""
        self._shares[tenant] = self._shares.pop(tenant, TenantAccount())  # moved to the end: dropped last

    def forget_idle(self, waiting: Mapping[str, object]) -> None:
        """Drop the accounts that were idle longest, if too many are kept."""
        if len(self._shares) <= 2 * (_MOST_IDLE + len(waiting)):
            return
        idle = [tenant for tenant, share in self._shares.items() if not share.num_open and tenant not in waiting]
        for tenant in idle[: max(0, len(idle) - _MOST_IDLE)]:
            del self._shares[tenant]


class ServiceAccount(Protocol):
    """Receives the starts and ends of groups."""

    def started(self, group: Group) -> None:
        """The group was given blocks, for the first time or again."""

    def ended(self, group: Group) -> None:
        """The group's last sequence ended, in any queue."""

    def held_up(self, group: Group, num_tokens: int) -> None:
        """The group's grammar took time in which so many tokens could have been computed."""

    def passed_over(self, group: Group) -> tuple[Group, int] | None:
        """The group that would precede `group` without fairness, and its tenant's lead in tokens; None if there is
        none.
        """

    def owes(self, group: Group, head: Group) -> bool:
        """Whether a started group ranks behind the head of the queue because its tenant was served more."""

    def over_share(self, head: Group, running: Sequence[Group]) -> list[Group]:
        """Running groups of tenants above their share of places, if the tenant of `head` is below its own."""


class NoTenantAccounts:
    """Account that treats all tenants alike."""

    def started(self, group: Group) -> None:
        """No-op."""

    def ended(self, group: Group) -> None:
        """No-op."""

    def held_up(self, group: Group, num_tokens: int) -> None:
        """No-op."""

    def passed_over(self, group: Group) -> tuple[Group, int] | None:
        """Return None."""
        return None

    def owes(self, group: Group, head: Group) -> bool:
        """Return False."""
        return False

    def over_share(self, head: Group, running: Sequence[Group]) -> list[Group]:
        """Return an empty list."""
        return []
