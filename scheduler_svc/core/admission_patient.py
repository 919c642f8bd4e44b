"""Adapter slots under bounded waiting: who needs one more adapter is passed over, but not for ever."""

from scheduler_svc.core.admission import LoraSlots, OpenGate
from scheduler_svc.core.parts import Ordering
from scheduler_svc.core.policy import Verdict
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.step_draft import StepDraft


class PatientSlots(OpenGate):
    """`LoraSlots` until a request is `patience_s` later than it should have started; from then on nobody behind it starts until its
    adapter has a slot (R53, R202)."""

    def __init__(self, max_loras: int, ordering: Ordering, patience_s: float) -> None:
        self._slots = LoraSlots(max_loras)
        self._max_loras = max_loras
        self._ordering = ordering
        self._patience_s = patience_s

    def check(self, group: Group, state: CoreState, draft: StepDraft) -> Verdict:
        """SKIP, or STOP for who has been patient."""
        verdict = self._slots.check(group, state, draft)
        if verdict is not Verdict.SKIP or draft.now <= self._ordering.key(group)[0] + self._patience_s:
            return verdict
        state.journal.stop(group, Reason.LORA_SLOTS, adapter=group.request.lora_id, limit=self._max_loras)
        return Verdict.STOP
