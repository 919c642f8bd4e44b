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
