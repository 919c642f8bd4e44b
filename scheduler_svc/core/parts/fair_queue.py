"""Fair waiting queue over tenants: the least served tenant is next; within a tenant the policy's ordering applies."""

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence

from scheduler_svc.core.parts.admission import OpenGate
from scheduler_svc.core.parts.interfaces import Key, Ordering
from scheduler_svc.core.parts.phases import AdmissionVerdict
from scheduler_svc.core.parts.queues import GroupQueue, queue_for
from scheduler_svc.core.parts.tenant_accounts import TenantShares
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group
from scheduler_svc.core.state import CoreState

CLASS_TOKENS = 4_096
"""Weighted tokens of service that one priority class is worth between tenants."""
BURST_TOKENS = 8_192
"""Maximum lag of a returning tenant's counter behind the others: the service it can get before it must take turns."""

Rank = tuple[int, int, Key, str]


class FairQueue:
    """One queue per waiting tenant, in the policy's ordering; next is the head of the tenant with the lowest rank.

        rank = tokens served (`tenant_accounts`) + CLASS_TOKENS * class of its head (if the ordering has classes)

    Ties go to the tenant served longest ago. So a tenant with a backlog lags any other by at most one request,
    the running requests and the class difference of their heads, whatever the others send: no tenant starves,
    and no slot is left empty for fairness. A tenant that returns after a pause gets at most BURST_TOKENS of
    service before the others. With one tenant this is that tenant's queue.

    Each operation takes logarithmic time in the number of waiting tenants, plus that of the tenant's own queue.
    """

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._queues: dict[str, GroupQueue] = {}
        self._order: list[Rank] = []
        self._rank_of: dict[str, Rank] = {}
        self._num_groups = 0
        self._least = 0
        self.shares = TenantShares()

    def __len__(self) -> int:
        return self._num_groups

    def __iter__(self) -> Iterator[Group]:
        """The head first, then the rest tenant by tenant, as if none were served in between."""
        return (group for rank in self._order for group in self._queues[rank[-1]])

    # --- as a queue -----------------------------------------------------------------------------------------------

    def push(self, group: Group) -> None:
        """Add a new group. The counter of a tenant that had none waiting is raised to at most BURST_TOKENS below
        the least served.

        The least served is that of the waiting tenants, or of the last that waited. Idle time thus earns no
        more than BURST_TOKENS.
        """
        tenant = group.request.tenant
        if tenant not in self._queues:
            least = self._order[0][0] if self._order else self._least
            self.shares.lift(tenant, least - BURST_TOKENS)
            self._queues[tenant] = queue_for(self._ordering)
        self._queues[tenant].push(group)
        self._num_groups += 1
        self._rank(tenant)

    def push_front(self, group: Group) -> None:
        """Put a group back at the front of its tenant's queue."""
        tenant = group.request.tenant
        if tenant not in self._queues:
            self._queues[tenant] = queue_for(self._ordering)
        self._queues[tenant].push_front(group)
        self._num_groups += 1
        self._rank(tenant)

    def peek(self) -> Group:
        """The head; IndexError when empty."""
        return self._queues[self._order[0][-1]].peek()

    def pop(self) -> Group:
        """Remove and return the head; IndexError when empty."""
        tenant = self._order[0][-1]
        group = self._queues[tenant].pop()
        self._num_groups -= 1
        self._rank(tenant)
        return group

    def remove(self, group: Group) -> None:
        """Remove a group; ValueError if it is not there."""
        tenant = group.request.tenant
        if tenant not in self._queues:
            raise ValueError(f"request {group.request.request_id} is not in this queue")
        self._queues[tenant].remove(group)
        self._num_groups -= 1
        self._rank(tenant)

    def sort(self, ordering: Ordering) -> None:
        """Sort each tenant's queue once by that ordering."""
        for tenant, queue in self._queues.items():
            queue.sort(ordering)
            self._rank(tenant)

    # --- as an account --------------------------------------------------------------------------------------------

    def started(self, group: Group) -> None:
        """Charge the group to its tenant."""
        self.shares.charge(group)
        self._rank_again(group.request.tenant)

    def ended(self, group: Group) -> None:
        """Correct the group's charge to its actual output."""
        self.shares.settle(group)
        self._rank_again(group.request.tenant)

    def held_up(self, group: Group, num_tokens: int) -> None:
        """Charge mask time to the group's tenant like prompt tokens."""
        self.shares.charge_masks(group.request.tenant, num_tokens)
        self._rank_again(group.request.tenant)

    def passed_over(self, group: Group) -> tuple[Group, int] | None:
        """The head of the most served tenant, if by the ordering alone it would precede `group`, and its lead in
        tokens.
        """
        most = self._order[-1]
        if most[-1] == group.request.tenant:
            return None
        head = self._queues[most[-1]].peek()
        if self._ordering.key(head) >= self._ordering.key(group):
            return None
        return head, most[0] - self._rank_of[group.request.tenant][0]

    def owes(self, group: Group, head: Group) -> bool:
        """True if the group's tenant is another than the head's and was served no less."""
        mine, other = group.request.tenant, head.request.tenant
        return mine != other and self.shares.of(mine).num_served >= self.shares.of(other).num_served

    def over_share(self, head: Group, running: Sequence[Group]) -> list[Group]:
        """Running groups of tenants that have more than their share, if the head's tenant has less than its own.

        A share is the number of running groups divided by the number of tenants that run or wait. A group
        preempted for `head` cannot displace it or its tenant's others in turn, as its tenant is not below its
        share afterwards.
        """
        tenant = head.request.tenant
        counts = Counter(group.request.tenant for group in running)
        share = len(running) // len({*counts, *self._queues})
        if counts[tenant] >= share:
            return []
        return [group for group in running if counts[group.request.tenant] > share]

    # --- internals ------------------------------------------------------------------------------------------------

    def _rank_again(self, tenant: str) -> None:
        if tenant in self._queues:
            self._rank(tenant)

    def _rank(self, tenant: str) -> None:
        """Recompute a tenant's rank after a change."""
        old = self._rank_of.pop(tenant, None)
        if old is not None:
            del self._order[bisect.bisect_left(self._order, old)]
        queue = self._queues[tenant]
        if len(queue):
            share, head = self.shares.of(tenant), queue.peek()
            lead = CLASS_TOKENS * head.request.priority_class if self._ordering.sorts_waiting else 0
            new = share.num_served + lead, share.last_turn, self._ordering.key(head), tenant
            self._rank_of[tenant] = new
            bisect.insort(self._order, new)
            return
        del self._queues[tenant]
        self._least = self.shares.of(tenant).num_served
        self.shares.rest(tenant)
        self.shares.forget_idle(self._queues)


class TellsShares(OpenGate):
    """Refuses no group; records the first one that would be next if its tenant had not been served more than others."""

    def check(self, group: Group, state: CoreState, builder: PlanBuilder) -> AdmissionVerdict:
        """Return ENTER."""
        passed = state.account.passed_over(group)
        if passed is not None:
            head, num_ahead = passed
            state.journal.skip(head, Reason.TENANT_SHARE, tokens_ahead=num_ahead)
        return AdmissionVerdict.ENTER
