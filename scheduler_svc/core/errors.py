"""Errors of the core other than invalid input."""

from svc_common.errors import ResourceExhausted


class StepFailed(ResourceExhausted):
    """The step cannot be planned: no host blocks are free for a group that must be swapped out.

    `request_id`: of that group. `preempted`: (request id, mode) of those already preempted in this step. The
    step's decisions are lost: call `reset_sequences_of_lost_worker()` before planning again.
    """

    def __init__(self, request_id: str, preempted: list[tuple[str, str]]) -> None:
        super().__init__(f"no host blocks left to swap out request {request_id}", reason="CPU_SWAP_SPACE")
        self.request_id = request_id
        self.preempted = preempted


class TaskDoesNotFit(ResourceExhausted):
    """A task is larger than the whole cache, and the policy, like Chitu, fails the step for that.

    `kind`: "prefill_does_not_fit" or "decode_cannot_finish". `num_tokens`: prompt and output tokens so far.
    `evicted`: (request id, block threshold after it) of tasks already preempted in this step. The step's
    decisions are lost, as with `StepFailed`.
    """

    def __init__(self, kind: str, request_id: str, num_tokens: int, evicted: list[tuple[str, int]]) -> None:
        super().__init__(f"request {request_id}: {kind} with {num_tokens} tokens", reason="TASK_DOES_NOT_FIT")
        self.kind = kind
        self.request_id = request_id
        self.num_tokens = num_tokens
        self.evicted = evicted
