"""The seams that see the whole state: phases, which plan a step, and admission and preemption, which they ask (design.md 4)."""

import enum
from collections.abc import Iterable
from typing import Protocol

from scheduler_svc.core.request import Group
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.step_draft import StepDraft


class Phase(Protocol):
    """One stage of planning a step. Only phases move groups between queues."""

    def run(self, state: CoreState, draft: StepDraft) -> None:
        """Adds to the draft what this phase schedules, within its budget."""


class Verdict(enum.Enum):
    """What admission says of a waiting group."""

    ENTER = "enter"
    SKIP = "skip"
    STOP = "stop"
    REJECT = "reject"


class Admission(Protocol):
    """Whether waiting groups may start."""

    def gate(self, state: CoreState, draft: StepDraft) -> bool:
        """Asked before each look at the head of the queue: may anybody start at all?"""

    def check(self, group: Group, state: CoreState, draft: StepDraft) -> Verdict:
        """Asked for the head of the queue."""

    def close(self, num_started: int) -> None:
        """The phase is over; so many groups started."""


class Preemption(Protocol):
    """Who leaves when blocks run out, and how."""

    def victim(self, candidates: list[Group], needy: Group, state: CoreState) -> Group:
        """Who leaves for `needy`: one of them (not empty), in running order, or itself."""

    def preempt(self, group: Group, state: CoreState, draft: StepDraft) -> str:
        """Takes its blocks and notes the event; "recompute" or "swap": the queue it belongs to. The caller moves it there."""


def gates_open(checks: Iterable[Admission], state: CoreState, draft: StepDraft) -> bool:
    """Whether all gates are; every part is asked, as asking may be counted (R57)."""
    return all([check.gate(state, draft) for check in checks])


def first_refusal(checks: Iterable[Admission], group: Group, state: CoreState, draft: StepDraft) -> Verdict:
    """The first verdict that is not ENTER, else ENTER."""
    for check in checks:
        verdict = check.check(group, state, draft)
        if verdict is not Verdict.ENTER:
            return verdict
    return Verdict.ENTER
