"""Admission checks: whether a waiting group may start."""

from scheduler_svc.core.parts.interfaces import Ordering
from scheduler_svc.core.parts.phases import AdmissionVerdict
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group, QueueKind
from scheduler_svc.core.state import CoreState


class OpenGate:
    """Base of checks without a gate and without state."""

    def gate(self, state: CoreState, builder: PlanBuilder) -> bool:
        """Return True."""
        return True

    def check(self, group: Group, state: CoreState, builder: PlanBuilder) -> AdmissionVerdict:
        """Return ENTER."""
        return AdmissionVerdict.ENTER

    def close(self, num_started: int) -> None:
        """No-op."""


class MaxSeqs(OpenGate):
    """Run no more than `max_num_seqs` sequences at a time."""

    def check(self, group: Group, state: CoreState, builder: PlanBuilder) -> AdmissionVerdict:
        """STOP if there would be more."""
        num_running = state.num_running_seqs
        if num_running + group.max_num_running_seqs <= state.limits.max_num_seqs:
            return AdmissionVerdict.ENTER
        state.journal.stop(group, Reason.MAX_SEQS, running=num_running, limit=state.limits.max_num_seqs)
        return AdmissionVerdict.STOP


class LoraSlots(OpenGate):
    """At most `max_loras` adapters in a batch; groups that would need one more are passed over."""

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras

    def check(self, group: Group, state: CoreState, builder: PlanBuilder) -> AdmissionVerdict:
        """SKIP if there would be more."""
        lora_id = group.request.lora_id
        if not lora_id or lora_id in builder.lora_ids or len(builder.lora_ids) < self._max_loras:
            return AdmissionVerdict.ENTER
        state.journal.skip(group, Reason.LORA_SLOTS, adapter=lora_id, limit=self._max_loras)
        return AdmissionVerdict.SKIP


class Delay(OpenGate):
    """Batch prompts: start none until the oldest has waited `delay_factor` times the last prompt step's duration."""

    MEMORY = ("_prev_time", "_prev_prompt", "_last_prompt_latency")

    def __init__(self, delay_factor: float) -> None:
        self._factor = delay_factor
        self._prev_time = 0.0
        self._prev_prompt = False
        self._last_prompt_latency = 0.0

    def gate(self, state: CoreState, builder: PlanBuilder) -> bool:
        """Open if the oldest waited long enough, or no group runs.

        As in vLLM, a second call in a step clears the flag that the last step had prompts.
        """
        if self._prev_prompt:
            self._last_prompt_latency = builder.now - self._prev_time
        self._prev_time, self._prev_prompt = builder.now, False
        if self._factor <= 0 or not len(state.waiting) or not state.running:
            return True
        waited_s = builder.now - min(group.request.arrival_time for group in state.waiting)
        delay_s = self._factor * self._last_prompt_latency
        if waited_s > delay_s:
            return True
        state.journal.stop_all(QueueKind.WAITING, Reason.DELAY, waited_s=waited_s, delay_s=delay_s)
        return False

    def close(self, num_started: int) -> None:
        """Remember whether this step has prompts."""
        self._prev_prompt = self._prev_prompt or num_started > 0


class WholeBatch(OpenGate):
    """Static batching: no group joins a running batch, so the slowest sequence delays all waiting requests.

    This is the baseline that continuous batching is compared with.
    """

    def gate(self, state: CoreState, builder: PlanBuilder) -> bool:
        """Open while a batch is being assembled: until the worker holds its first sequence."""
        if not state.running or state.running[0].live[0].name not in state.on_worker:
            return True
        if len(state.waiting):
            state.journal.stop_all(QueueKind.WAITING, Reason.BATCH_UNDER_WAY, running=len(state.running))
        return False


class PatientSlots(OpenGate):
    """`LoraSlots` with a limit on overtaking: once a request is `patience_s` late, no group behind it starts
    before its adapter has a slot.
    """

    def __init__(self, max_loras: int, ordering: Ordering, patience_s: float) -> None:
        self._slots = LoraSlots(max_loras)
        self._max_loras = max_loras
        self._ordering = ordering
        self._patience_s = patience_s

    def check(self, group: Group, state: CoreState, builder: PlanBuilder) -> AdmissionVerdict:
        """SKIP, or STOP for a request that is `patience_s` late."""
        verdict = self._slots.check(group, state, builder)
        if verdict is not AdmissionVerdict.SKIP or builder.now <= self._ordering.key(group)[0] + self._patience_s:
            return verdict
        state.journal.stop(group, Reason.LORA_SLOTS, adapter=group.request.lora_id, limit=self._max_loras)
        return AdmissionVerdict.STOP
