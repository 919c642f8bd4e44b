"""Chitu's data-parallel scheduler: a step is prefills on all ranks that have some, or decodes on all (R188-R195)."""

from scheduler_svc.core.policies.chitu.affinity import PrefixAffinity
from scheduler_svc.core.policies.chitu.lanes import Ranks
from scheduler_svc.core.policies.chitu.reserved import Reservation, give_all, has_rows
from scheduler_svc.core.policies.chitu.scorers import nanoseconds
from scheduler_svc.core.policies.chitu.tasks import Room, TaskShares, pool
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group, Place
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.step_draft import StepDraft


class RankBatches:
    """Decides for all ranks when the first is planned, and hands each its list when its turn comes: the collector (R194, R195).

    Every rank gets a plan, those without work an empty one. `affinity`: who goes to a rank that knows its prefix instead of the one
    whose turn it is, over the caches of all ranks. `starves`: a rank may get a chunk of nothing, and newcomers may come before
    prompts under way for ever, as in the reference.
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
        """Other sizes from the next batches on; owners stay."""
        self._ranks.tasks_per_rank = self._ranks.depth = tasks_per_rank
        self._chunks = self._chunks_of(chunk_size)

    def run(self, state: CoreState, draft: StepDraft) -> None:
        """See the class."""
        if draft.lane == 0:
            self._decide(state)
        batch, chunk_size = self._batches[draft.lane], self._chunks[draft.lane] if self._is_prefill else None
        if batch:
            room = Room.of_chunks(chunk_size, self._cache.num_free_of(draft.lane), draft)
            give_all(batch, room, self._shares, state, draft)

    def _decide(self, state: CoreState) -> None:
        tasks = pool(state)
        self._batches = self._prefills(tasks, state)
        self._is_prefill = any(self._batches)
        if not self._is_prefill and not state.is_warming_up:
            ready = [group for group in tasks if not group.in_prefill and self._shares.is_ready(group)]
            self._batches = self._by_owner(ready)
        if len(state.waiting):
            # Of all that wait beyond those looked at; who starts in this step says so itself.
            state.journal.stop_all(Place.WAITING, Reason.LANE_BUSY)

    def _prefills(self, tasks: list[Group], state: CoreState) -> list[list[Group]]:
        """The oldest, each with its owner; ranks without a chunk have none (R189-R191)."""
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
        num_blocks = self._cache.num_usable_of_rank
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
        """No rank has both a place and the blocks: the one with a place that comes nearest says how many it lacks."""
        shortages = [one.shortage(group) for one, open_ in zip(reservations, has_place, strict=True) if open_]
        if shortages:
            state.journal.skip(group, Reason.RESERVED, **max(shortages, key=lambda numbers: numbers["free"]))
        else:
            state.journal.skip(group, Reason.LANE_BUSY)

    def _owner(self, group: Group, num_owned: list[int], has_room: list[bool], state: CoreState) -> int | None:
        """The rank that its prefix draws it to, else the one whose turn it is; None where no rank has room."""
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
        """Per rank, in their order; those without an owner are left out."""
        return [[group for group in groups if group.lane == rank] for rank in range(self._ranks.num_ranks)]

    def _chunks_of(self, chunk_size: int | None) -> list[int | None]:
        return [self._chunk_of(rank, chunk_size) for rank in range(self._ranks.num_ranks)]

    def _chunk_of(self, rank: int, chunk_size: int | None) -> int | None:
        """Rank 0 has what the others leave (R191)."""
        if chunk_size is None:
            return None
        share, rest = divmod(chunk_size, self._ranks.num_ranks)
        share += rest if rank == 0 else 0
        return share if self._starves else max(1, share)
