"""The waiting queue of many tenants: whose turn it is goes by what they were served, who of them by the policy's ordering."""

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence

from scheduler_svc.core.parts.admission import OpenGate
from scheduler_svc.core.parts.interfaces import Key, Ordering
from scheduler_svc.core.parts.ordering import class_of
from scheduler_svc.core.parts.queues import GroupQueue, queue_for
from scheduler_svc.core.parts.tenant_shares import TenantShares
from scheduler_svc.core.policy import Verdict
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.step_draft import StepDraft

CLASS_TOKENS = 4_096
"""What one class of priority is worth between tenants, in weighted tokens served."""
BURST_TOKENS = 8_192
"""How far behind the others a tenant that comes back may be: what it can have at once before it takes turns."""

Rank = tuple[int, int, Key, str]


class FairQueue:
    """A queue for each tenant that waits, in the policy's ordering; next is the head of the tenant that was served least:

        rank = tokens served (`tenant_shares`) + CLASS_TOKENS * class of its head (core priority, where the ordering has any)

    equal ones: who was served longer ago. So whoever has a backlog is at most a request, what runs, and the classes between their
    heads behind any other, whatever the others send; nobody starves, and a slot is never left empty for fairness. Who comes after a
    pause has at most BURST_TOKENS before the others. With one tenant it is that tenant's queue and nothing else.

    Each change costs the logarithm of the number of tenants that wait, beside what it costs in the tenant's own queue.
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
        """The head first; the rest tenant by tenant, as if nobody were served meanwhile."""
        return (group for rank in self._order for group in self._queues[rank[-1]])

    # --- as a queue -----------------------------------------------------------------------------------------------

    def push(self, group: Group) -> None:
        """Adds a newcomer; a tenant that had none waiting is lifted to BURST_TOKENS below the least served that waits, or waited
        last: more it cannot have saved up."""
        tenant = group.request.tenant
        if tenant not in self._queues:
            least = self._order[0][0] if self._order else self._least
            self.shares.lift(tenant, least - BURST_TOKENS)
        self._queue_of(tenant).push(group)
        self._num_groups += 1
        self._rank(tenant)

    def push_front(self, group: Group) -> None:
        """Puts one back to the front of its tenant's."""
        tenant = group.request.tenant
        self._queue_of(tenant).push_front(group)
        self._num_groups += 1
        self._rank(tenant)

    def peek(self) -> Group:
        """The head; IndexError when empty."""
        return self._queues[self._order[0][-1]].peek()

    def pop(self) -> Group:
        """Takes the head; IndexError when empty."""
        tenant = self._order[0][-1]
        group = self._queues[tenant].pop()
        self._num_groups -= 1
        self._rank(tenant)
        return group

    def remove(self, group: Group) -> None:
        """Takes one out; ValueError when it is not there (R30)."""
        tenant = group.request.tenant
        if tenant not in self._queues:
            raise ValueError(f"request {group.request.request_id} is not in this queue")
        self._queues[tenant].remove(group)
        self._num_groups -= 1
        self._rank(tenant)

    def sort(self, ordering: Ordering) -> None:
        """Puts each tenant's in that ordering once."""
        for tenant, queue in self._queues.items():
            queue.sort(ordering)
            self._rank(tenant)

    # --- as an account --------------------------------------------------------------------------------------------

    def started(self, group: Group) -> None:
        """It is charged."""
        self.shares.charge(group)
        self._rank_again(group.request.tenant)

    def ended(self, group: Group) -> None:
        """What it was charged is set right."""
        self.shares.settle(group)
        self._rank_again(group.request.tenant)

    def held_up(self, group: Group, num_tokens: int) -> None:
        """Its tenant pays for it like for tokens of a prompt."""
        self.shares.charge_masks(group.request.tenant, num_tokens)
        self._rank_again(group.request.tenant)

    def passed_over(self, group: Group) -> tuple[Group, int] | None:
        """The head of the tenant that was served most, where it would be before `group` by the ordering alone."""
        most = self._order[-1]
        if most[-1] == group.request.tenant:
            return None
        head = self._queues[most[-1]].peek()
        if self._ordering.key(head) >= self._ordering.key(group):
            return None
        return head, most[0] - self._rank_of[group.request.tenant][0]

    def owes(self, group: Group, head: Group) -> bool:
        """Its tenant was served no less than that of the head."""
        mine, other = group.request.tenant, head.request.tenant
        return mine != other and self.shares.of(mine).num_served >= self.shares.of(other).num_served

    def over_share(self, head: Group, running: Sequence[Group]) -> list[Group]:
        """A tenant's share of the places: as many as any other has that runs or waits. What leaves for `head` can never push it, or
        its like, out again: its tenant is not below its share then."""
        tenant = head.request.tenant
        counts = Counter(group.request.tenant for group in running)
        share = len(running) // len({*counts, *self._queues})
        if counts[tenant] >= share:
            return []
        return [group for group in running if counts[group.request.tenant] > share]

    # --- inside ---------------------------------------------------------------------------------------------------

    def _queue_of(self, tenant: str) -> GroupQueue:
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = queue_for(self._ordering)
        return queue

    def _rank_again(self, tenant: str) -> None:
        if tenant in self._queues:
            self._rank(tenant)

    def _rank(self, tenant: str) -> None:
        """Where it stands among those that wait, after anything of it changed."""
        old = self._rank_of.pop(tenant, None)
        if old is not None:
            del self._order[bisect.bisect_left(self._order, old)]
        queue = self._queues[tenant]
        if len(queue):
            new = self._rank_of[tenant] = self._new_rank(tenant, queue.peek())
            bisect.insort(self._order, new)
            return
        del self._queues[tenant]
        self._least = self.shares.of(tenant).num_served
        self.shares.rest(tenant)
        self.shares.forget_idle(self._queues)

    def _new_rank(self, tenant: str, head: Group) -> Rank:
        share = self.shares.of(tenant)
        lead = CLASS_TOKENS * class_of(head.request) if self._ordering.sorts_waiting else 0
        return share.num_served + lead, share.last_turn, self._ordering.key(head), tenant


class TellsShares(OpenGate):
    """Refuses nobody: tells the first of those who would be served now, had their tenant not been served more than others."""

    def check(self, group: Group, state: CoreState, draft: StepDraft) -> Verdict:
        """ENTER."""
        passed = state.account.passed_over(group)
        if passed is not None:
            head, num_ahead = passed
            state.journal.skip(head, Reason.TENANT_SHARE, tokens_ahead=num_ahead)
        return Verdict.ENTER
