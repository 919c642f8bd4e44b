"""Plans in flight: the shares for which each will return results.

Whether a plan is sent while another runs: `loop/step_pipelining`.
"""

from scheduler_svc.core.entries import SequenceInFlight
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.request import Group, Sequence
from scheduler_svc.core.state import CoreState


class PlansInFlight:
    """Owner of the shares of all plans in flight, except fast-decode rows, which `FastRows` keeps by step."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._by_step: dict[int, list[SequenceInFlight]] = {}
        self._moved: dict[int, list[str]] = {}
        self._reduced: dict[int, None] = {}

    def __bool__(self) -> bool:
        """True if any plan is in flight."""
        return bool(self._by_step)

    def take_off(self, plan: StepPlan, builder: PlanBuilder) -> None:
        """Record a plan with work as in flight."""
        if plan.fast is not None:
            self._state.fast_rows.take_off(plan.step, plan.fast.rows, plan.fast.computed_before)
        if plan.swapped_out:
            self._moved[plan.step] = list(plan.swapped_out)
        self._by_step[plan.step] = list(builder.entries.values())

    def land(self, step: int) -> list[SequenceInFlight]:
        """Remove and return the shares of a finished plan; its fast-decode rows stay until they are applied.

        Those of groups that were preempted and started on another worker group since are dropped: their tokens are computed there.
        """
        self._moved.pop(step, None)
        self._reduced.pop(step, None)
        shares, here = self._by_step.pop(step, []), self._state.number
        if len(self._state.shared.workers) == 1:
            return shares
        flight = self._state.fast_rows.flights.get(step)
        if flight is not None:
            flight.left = {place: group for place, group in flight.left.items() if group.worker == here}
        return [share for share in shares if share.sequence.group.worker == here]

    def land_as_objects(self, step: int) -> list[SequenceInFlight]:
        """Remove and return all shares of a plan when its result will not be applied; its rows become objects."""
        self._state.fast_rows.dissolve()
        shares = self.land(step)
        return sorted([*shares, *self._state.fast_rows.land(step)], key=lambda flight: flight.ticket)

    def is_reduced(self, step: int) -> bool:
        """True if results of that plan may be ignored (`discard`): it has more to compute than its shares."""
        return step in self._reduced

    def clear(self) -> None:
        """Drop all plans in flight."""
        self._state.fast_rows.dissolve()
        self._by_step.clear()
        self._reduced.clear()
        self._moved.clear()

    def clear_lane(self, lane: int) -> None:
        """Drop the plans in flight for that lane, and those without remaining shares (their lane is unknown)."""
        self._state.fast_rows.dissolve()
        for step, flights in list(self._by_step.items()):
            if not flights or flights[0].sequence.lane == lane:
                del self._by_step[step]
                self._moved.pop(step, None)
                self._reduced.pop(step, None)

    def discard(self, sequences: list[Sequence]) -> None:
        """Ignore the results for these sequences; their plans stay in flight."""
        names = {sequence.name for sequence in sequences}
        self._reduced.update(dict.fromkeys(self._by_step))
        for step, flights in self._by_step.items():
            self._by_step[step] = [flight for flight in flights if flight.sequence.name not in names]
        self._state.fast_rows.discard([sequence.group for sequence in sequences])

    def groups_built_on(self, failed: list[SequenceInFlight]) -> list[Group]:
        """Other groups, in order, that may depend on the KV that these shares were to compute.

        They are in plans still in flight, hold blocks that were to be filled, or may have copies of such blocks
        on the host because a plan in flight swaps them out.
        """
        own = {flight.sequence.name for flight in failed}
        names, unfilled = self._names(), self._blocks_to_fill(failed)
        tables = self._state.cache.ledger.tables
        moved = {request_id for requests in self._moved.values() for request_id in requests}
        return [
            group
            for group in (*self._state.running, *self._state.swapped)
            if own.isdisjoint(s.name for s in group.live)
            and (
                group.sequences[0].name in names
                or group.request.request_id in moved
                or any(not unfilled.isdisjoint(tables.get(s.name, ())) for s in group.live)
            )
        ]

    def has(self, name: str) -> bool:
        """True if a plan in flight has a share for a sequence that is the first of its group."""
        return name in self._names()

    def _names(self) -> set[str]:
        """Names of the first sequences of all groups in plans in flight."""
        groups = [flight.sequence.group for flights in self._by_step.values() for flight in flights]
        rows = [group for flight in self._state.fast_rows.flights.values() for group in flight.left.values()]
        return {group.sequences[0].name for group in [*groups, *rows]}

    def _blocks_to_fill(self, flights: list[SequenceInFlight]) -> set[int]:
        ledger = self._state.cache.ledger
        return {
            block for flight in flights for block in ledger.blocks_behind(flight.sequence.name, flight.computed_before)
        }
