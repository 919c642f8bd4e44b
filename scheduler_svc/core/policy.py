"""The seams that see the whole state: phases, which plan a step, and admission, which they ask (design.md 4)."""

import enum
from collections.abc import Iterable
from typing import Protocol

from scheduler_svc.core.budget import StepBudget
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.step_draft import StepDraft


class Phase(Protocol):
    """One stage of planning a step. Only phases move sequences between queues."""

    def run(self, state: CoreState, budget: StepBudget, draft: StepDraft) -> None:
        """Adds to the draft what this phase schedules, within the budget."""


class Verdict(enum.Enum):
    """What admission says of a waiting sequence."""

    ENTER = "enter"
    SKIP = "skip"
    STOP = "stop"
    REJECT = "reject"


class Admission(Protocol):
    """Whether waiting sequences may start."""

    def gate(self, state: CoreState, now: float) -> bool:
        """Asked once per turn: may anybody start at all?"""

    def check(self, sequence: Sequence, state: CoreState) -> Verdict:
        """Asked for the head of the queue."""


def first_refusal(checks: Iterable[Admission], sequence: Sequence, state: CoreState) -> Verdict:
    """The first verdict that is not ENTER, else ENTER."""
    for check in checks:
        verdict = check.check(sequence, state)
        if verdict is not Verdict.ENTER:
            return verdict
    return Verdict.ENTER
