"""Protocols of the parts that see the whole state: phases, admission and preemption."""

import enum
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.request import Group
from scheduler_svc.core.state import CoreState


class Phase(Protocol):
    """One stage of planning a step. Only phases move groups between queues."""

    def run(self, state: CoreState, builder: PlanBuilder) -> None:
        """Add to the plan what this phase schedules, within its budget."""


@runtime_checkable
class RepeatablePhase(Phase, Protocol):
    """A phase that schedules running groups, and can grant repetitions of a step (`policies/mixed/decode_grants`)."""

    def repeat(self, state: CoreState, builder: PlanBuilder) -> None:
        """Schedule the step that the worker runs by a grant."""


class AdmissionVerdict(enum.Enum):
    """Answer of an admission check for a waiting group."""

    ENTER = "enter"
    SKIP = "skip"
    STOP = "stop"
    REJECT = "reject"


class AdmissionPart(Protocol):
    """Decides whether waiting groups may start."""

    def gate(self, state: CoreState, builder: PlanBuilder) -> bool:
        """Whether any group may start; asked before each look at the head of the queue."""

    def check(self, group: Group, state: CoreState, builder: PlanBuilder) -> AdmissionVerdict:
        """Whether this group, the head of the queue, may start."""

    def close(self, num_started: int) -> None:
        """End of a phase with waiting groups, of which `num_started` started."""


class Preemption(Protocol):
    """Chooses the group to preempt when blocks run out, and how (recompute or swap)."""

    def victim(self, candidates: list[Group], needy: Group, state: CoreState) -> Group:
        """The group to preempt for `needy`: one of `candidates` (not empty, in running order) or `needy` itself."""

    def preempt(self, group: Group, state: CoreState, builder: PlanBuilder) -> str:
        """Take the group's blocks and record the event.

        Returns "recompute" or "swap": the queue to which the caller moves the group.
        """


def gates_open(checks: Iterable[AdmissionPart], state: CoreState, builder: PlanBuilder) -> bool:
    """Whether all gates are open; each is asked even after one is closed, as a check may keep state per call."""
    return all([check.gate(state, builder) for check in checks])


def first_refusal(
    checks: Iterable[AdmissionPart], group: Group, state: CoreState, builder: PlanBuilder
) -> AdmissionVerdict:
    """The first verdict other than ENTER, else ENTER."""
    for check in checks:
        verdict = check.check(group, state, builder)
        if verdict is not AdmissionVerdict.ENTER:
            return verdict
    return AdmissionVerdict.ENTER
