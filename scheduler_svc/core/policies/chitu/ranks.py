"""Chitu's data-parallel scheduler: a step is prefills on all ranks that have some, or else decodes on all ranks."""

from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.policies.chitu.affinity import PrefixAffinity
from scheduler_svc.core.policies.chitu.lanes import Ranks
from scheduler_svc.core.policies.chitu.reserved import Reservation, give_all, has_rows
from scheduler_svc.core.policies.chitu.scorers import nanoseconds
from scheduler_svc.core.policies.chitu.tasks import Room, TaskShares, pool
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group, QueueKind
from scheduler_svc.core.state import CoreState


class RankBatches:
    """Decides for all ranks when the first is planned, then gives each its batch in turn (Chitu's collector).

    Every rank gets a plan, possibly an empty one. `affinity`: assigns tasks by cached prefix instead of
    round-robin. `starves`: as in Chitu, a rank's chunk may be 0 tokens, and new prompts may precede chunked
    ones forever.
    """

    def __init__(
        self, shares: TaskShares, ranks: Ranks, chunk_size: int | None, affinity: PrefixAffinity, *, starves: bool
    ) -> None:
        self._shares = shares
        self._ranks = ranks
        self._affinity = affinity
        self._cache = affinity.cache
        self._starves = starves
        self._chunks = self._chunks_of(chunk_size)
        self._batches: list[list[Group]] = []
        self._is_prefill = False

    def retune(self, tasks_per_rank: int, chunk_size: int | None) -> None:
        """Apply other sizes from the next batches on; assigned ranks stay."""
        self._ranks.tasks_per_rank = self._ranks.depth = tasks_per_rank
        self._chunks = self._chunks_of(chunk_size)

    def run(self, state: CoreState, builder: PlanBuilder) -> None:
        """Plan the batch of the plan's rank."""
        if builder.lane == 0:
            self._decide(state)
        batch, chunk_size = self._batches[builder.lane], self._chunks[builder.lane] if self._is_prefill else None
        if batch:
            room = Room.of_chunks(chunk_size, self._cache.num_free_of(builder.lane), builder)
            give_all(batch, room, self._shares, state, builder)

    def _decide(self, state: CoreState) -> None:
        tasks = pool(state)
        self._batches = self._prefills(tasks, state)
        self._is_prefill = any(self._batches)
        if not self._is_prefill and not state.is_warming_up:
            ready = [group for group in tasks if not group.in_prefill and self._shares.is_ready(group)]
            self._batches = self._by_owner(ready)
        if len(state.waiting):
            # For unexamined groups; a group that starts in this step records that itself.
            state.journal.stop_all(QueueKind.WAITING, Reason.LANE_BUSY)

    def _prefills(self, tasks: list[Group], state: CoreState) -> list[list[Group]]:
        """Prefill batches by rank, oldest tasks first; a rank with a chunk of 0 gets none."""
        waiting = [group for group in tasks if group.in_prefill and self._shares.is_ready(group)]
        candidates = sorted(waiting, key=lambda group: nanoseconds(group.request.arrival_time))
        num_places = self._ranks.tasks_per_rank * self._ranks.num_ranks
        if not self._starves:
            num_owned = sum(group.lane is not None for group in candidates)
            newcomers = [group for group in candidates if group.lane is None][: num_places - num_owned]
            allowed = {id(group) for group in newcomers}
            candidates = [group for group in candidates if group.lane is not None or id(group) in allowed]
        candidates = candidates[:num_places]
        self._find_owners(candidates, tasks, state)
        owned = self._by_owner([group for group in candidates if group.lane is not None])
        return [batch if self._chunks[rank] != 0 else [] for rank, batch in enumerate(owned)]

    def _find_owners(self, candidates: list[Group], tasks: list[Group], state: CoreState) -> None:
        entered = [group for group in tasks if group.lane is not None]
        num_owned = [len(owned) for owned in self._by_owner(entered)]
        num_blocks = self._cache.capacity_blocks
        reservations = [Reservation(owned, num_blocks, state) for owned in self._by_owner(entered)]
        for group in candidates:
            if group.lane is not None or not has_rows(group, entered, state):
                continue
            has_place = [n < self._ranks.tasks_per_rank and r not in self._ranks.out for r, n in enumerate(num_owned)]
            has_room = [has_place[r] and reservations[r].fits(group) for r in range(self._ranks.num_ranks)]
            rank = self._owner(group, num_owned, has_room, state)
            if rank is None:
                self._tell_no_rank(group, reservations, has_place, state)
                continue
            reservations[rank].take(group)
            num_owned[rank] += 1
            entered.append(group)

    @staticmethod
    def _tell_no_rank(group: Group, reservations: list[Reservation], has_place: list[bool], state: CoreState) -> None:
        """Record why no rank has both a place and the blocks, by the rank with a place that lacks the fewest blocks."""
        shortages = [one.shortage(group) for one, open_ in zip(reservations, has_place, strict=True) if open_]
        if shortages:
            state.journal.skip(group, Reason.RESERVED, **max(shortages, key=lambda numbers: numbers["free"]))
        else:
            state.journal.skip(group, Reason.LANE_BUSY)

    def _owner(self, group: Group, num_owned: list[int], has_room: list[bool], state: CoreState) -> int | None:
        """The rank with the longest cached prefix, else the next in the round-robin; None where no rank has room."""
        draw = self._affinity.draw(group.live[0], num_owned, has_room)
        if draw is None:
            return self._ranks.assign(group, has_room)
        if draw.num_tokens:
            numbers = {
                "rank": draw.rank,
                "known": draw.num_tokens,
                "tasks": num_owned[draw.rank],
                "least": draw.num_least,
            }
            state.journal.skip(group, Reason.PREFIX_AFFINITY, **numbers)
        self._ranks.settle(group, draw.rank)
        return draw.rank

    def _by_owner(self, groups: list[Group]) -> list[list[Group]]:
        """Groups by rank, in their order; unassigned ones are left out."""
        return [[group for group in groups if group.lane == rank] for rank in range(self._ranks.num_ranks)]

    def _chunks_of(self, chunk_size: int | None) -> list[int | None]:
        return [self._chunk_of(rank, chunk_size) for rank in range(self._ranks.num_ranks)]

    def _chunk_of(self, rank: int, chunk_size: int | None) -> int | None:
        """A rank's part of the prefill chunk; rank 0 also has the remainder."""
        if chunk_size is None:
            return None
        share, rest = divmod(chunk_size, self._ranks.num_ranks)
        share += rest if rank == 0 else 0
        return share if self._starves else max(1, share)
