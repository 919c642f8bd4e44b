"""What can go wrong in the core besides bad input."""

from svc_common.errors import ResourceExhausted


class StepFailed(ResourceExhausted):
    """The step could not be planned: the host has no room for a group that must be swapped out (R75).

    `request_id`: whose. `preempted`: (request id, mode) of those that had left in this step already. What was decided is lost: the
    core goes on after `reset_sequences_of_lost_worker()` only.
    """

    def __init__(self, request_id: str, preempted: list[tuple[str, str]]) -> None:
        super().__init__(f"no host blocks left to swap out request {request_id}", reason="CPU_SWAP_SPACE")
        self.request_id = request_id
        self.preempted = preempted


class TaskDoesNotFit(ResourceExhausted):
    """A task is larger than the whole cache, and the policy fails then, as recorded (R171, R173).

    `kind`: "prefill_does_not_fit" or "decode_cannot_finish". `num_tokens`: known ones. `evicted`: (request id, threshold after it)
    of those that had left in this step already. What was decided is lost, as with `StepFailed`.
    """

    def __init__(self, kind: str, request_id: str, num_tokens: int, evicted: list[tuple[str, int]]) -> None:
        super().__init__(f"request {request_id}: {kind} with {num_tokens} tokens", reason="TASK_DOES_NOT_FIT")
        self.kind = kind
        self.request_id = request_id
        self.num_tokens = num_tokens
        self.evicted = evicted
