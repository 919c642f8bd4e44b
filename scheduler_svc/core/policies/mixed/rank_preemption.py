"""Preempt running groups for a higher-ranked waiting group that lacks blocks or sequence places."""

from collections import Counter
from dataclasses import dataclass

from block_manager.cache_rules import DevicePool, PrefixHit
from scheduler_svc.core.parts.interfaces import Ordering, Progress
from scheduler_svc.core.parts.placement import fits_elsewhere
from scheduler_svc.core.parts.preemption import LeastLost
from scheduler_svc.core.parts.step_shares import StepShares
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.policies.mixed.mixed import leave, never_fits
from scheduler_svc.core.request import Group
from scheduler_svc.core.state import CoreState


@dataclass(frozen=True, slots=True)
class Plea:
    """What the head of the queue needs. `hit`: its cached prefix; `num_tokens`: tokens behind it to compute in one
    step.
    """

    head: Group
    hit: PrefixHit
    num_tokens: int


class RankPreemption:
    """Phase before the running phase: preempt groups until the head of the queue fits beside what the others take.

    Victims are of a lower priority class than the head, and more than `margin_s` behind it in `ordering`, so
    that groups that waited long are not displaced again. Or they are of a tenant with more than its share of
    places while the head's tenant has less (`ServiceAccount`). If even preempting all of them would not be
    enough, none is preempted. The head starts in the same step, in the waiting phase (`draft.favoured`). There
    is no thrashing: sort keys do not change, so a victim never displaces the group it was preempted for.
    """

    def __init__(
        self,
        ordering: Ordering,
        shares: StepShares,
        progress: Progress,
        preemption: LeastLost,
        cache: DevicePool,
        *,
        margin_s: float,
        max_loras: int | None,
    ) -> None:
        self._ordering = ordering
        self._shares = shares
        self._progress = progress
        self._preemption = preemption
        self._cache = cache
        self._margin_s = margin_s
        self._max_loras = max_loras
        self._without_victims: tuple[Group, int] | None = None

    def run(self, state: CoreState, builder: PlanBuilder) -> None:
        """Choose victims for the head of the queue and preempt them."""
        if not (len(state.waiting) and state.running) or state.guard.favourite is not None:
            return
        head = state.waiting.peek()
        outranked = self._outranked(head, state)
        if (
            not outranked
            or not self._is_next(head, state)
            or fits_elsewhere(head, state, builder)
            or not state.takes_work
        ):
            return
        plea = self._plea(head, state)
        if plea is None or self._fits_surely(plea, state, builder):
            return
        state.fast_rows.dissolve()
        for victim in self._victims(plea, outranked, state, builder):
            builder.favoured = builder.in_need = head
            leave(victim, self._preemption, state, builder)
            for sequence in victim.live:
                self._progress.on_preempted(sequence)

    def _outranked(self, head: Group, state: CoreState) -> list[Group]:
        """Running groups that may be preempted for the head. An empty result is cached until another group starts."""
        if self._without_victims is not None:
            last, num_started = self._without_victims
            if last is head and num_started == state.shared.num_started:
                return []
        rank, start_by = head.request.priority_class, self._ordering.key(head)[0] + self._margin_s
        found = [g for g in state.running if g.request.priority_class > rank and self._ordering.key(g)[0] > start_by]
        found += [g for g in self._over_share(head, state) if g not in found]
        self._without_victims = None if found else (head, state.shared.num_started)
        return found

    def _over_share(self, head: Group, state: CoreState) -> list[Group]:
        """Running groups of tenants above their share, except those of a higher priority class than the head."""
        rank = head.request.priority_class
        return [g for g in state.account.over_share(head, state.running) if g.request.priority_class >= rank]

    def _is_next(self, head: Group, state: CoreState) -> bool:
        """True if blocks or sequence places are the only obstacle: no result in flight, no swapped group ahead of it."""
        key = self._ordering.key(head)
        before = (g for g in state.swapped if self._ordering.key(g) <= key and not state.account.owes(g, head))
        return self._progress.may_resume(head.live[0]) and next(before, None) is None

    def _plea(self, head: Group, state: CoreState) -> Plea | None:
        """What the head needs; None where the pool could not hold it even alone."""
        first = head.live[0]
        if never_fits(head, state):
            return None
        hit = state.cache.lookup(first)
        return Plea(head, hit, self._shares.wanted_to_start(first, hit, state))

    def _fits_surely(self, plea: Plea, state: CoreState, builder: PlanBuilder) -> bool:
        """Conservative check that the head fits without preemption, even if each running group takes one more
        block of each cache group.

        Cheap enough to run in every step.
        """
        if state.num_running_seqs + plea.head.max_num_running_seqs > state.limits.max_num_seqs or self._max_loras:
            return False
        loose = [group for group in state.running if not group.is_fast]
        needed = sum(self._num_needed(group, state, builder)[1] for group in loose)
        needed += len(state.fast_rows.members) * state.cache.ledger.num_groups
        needed += self._cache.num_blocks_to_admit(plea.head.live, plea.hit, plea.num_tokens)
        return needed + state.cache.watermark_blocks <= state.cache.num_free_gpu

    def _victims(self, plea: Plea, outranked: list[Group], state: CoreState, builder: PlanBuilder) -> list[Group]:
        """The smallest set of victims, lowest class first and then least loss; empty if the head fits, or cannot
        fit anyway.
        """
        staying = {id(g): (g, *self._num_needed(g, state, builder)) for g in state.running}
        leaving: list[Group] = []
        if self._shares.left(builder, _num_tokens_of(staying)) <= 0:
            return []
        order = sorted(outranked, key=lambda g: (-g.request.priority_class, self._preemption.loss(g, state), -g.ticket))
        for victim in order:
            if self._fits(plea, staying, leaving, state, builder):
                break
            leaving.append(victim)
            del staying[id(victim)]
        if not self._fits(plea, staying, leaving, state, builder):
            return []
        for victim in leaving[:-1]:  # a later victim may be large enough to spare earlier ones
            others = [group for group in leaving if group is not victim]
            kept = {**staying, id(victim): (victim, *self._num_needed(victim, state, builder))}
            if self._fits(plea, kept, others, state, builder):
                staying, leaving = kept, others
        return leaving

    def _fits(
        self,
        plea: Plea,
        staying: dict[int, tuple[Group, int, int]],
        leaving: list[Group],
        state: CoreState,
        builder: PlanBuilder,
    ) -> bool:
        num_tokens = self._shares.starting(plea.num_tokens, state, builder, _num_tokens_of(staying))
        if not num_tokens:
            return False
        groups = [group for group, _, _ in staying.values()]
        num_seqs = sum(group.max_num_running_seqs for group in groups)
        if num_seqs + plea.head.max_num_running_seqs > state.limits.max_num_seqs or not self._has_slot(plea, groups):
            return False
        free = state.cache.num_free_gpu + num_freed(leaving, plea.hit, state)
        free -= sum(num_blocks for _, _, num_blocks in staying.values())
        needed = self._cache.num_blocks_to_admit(plea.head.live, plea.hit, num_tokens)
        return needed + (state.cache.watermark_blocks if groups else 0) <= free

    def _has_slot(self, plea: Plea, groups: list[Group]) -> bool:
        adapters = dict.fromkeys(g.request.lora_id for g in groups if g.request.lora_id > 0)
        lora_id = plea.head.request.lora_id
        return self._max_loras is None or not lora_id or lora_id in adapters or len(adapters) < self._max_loras

    def _num_needed(self, group: Group, state: CoreState, builder: PlanBuilder) -> tuple[int, int]:
        """(tokens, blocks) that a running group takes of an empty step."""
        shares = self._shares.running(group, state, builder)
        return sum(n for _, n in shares), sum(self._cache.num_blocks_needed(s, n) for s, n in shares)


def _num_tokens_of(staying: dict[int, tuple[Group, int, int]]) -> int:
    return sum(num_tokens for _, num_tokens, _ in staying.values())


def num_freed(groups: list[Group], but: PrefixHit, state: CoreState) -> int:
    """Device blocks freed when these groups are preempted, except those of a prefix that is about to be reused."""
    ledger, kept = state.cache.ledger, dict.fromkeys(but.block_ids)
    held = Counter(block for g in groups for s in g.live for block in ledger.tables.get(s.name, ()))
    return sum(ledger.gpu.refs[block] == count and block not in kept for block, count in held.items())
