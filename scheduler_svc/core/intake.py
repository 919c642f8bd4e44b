"""Validate requests and split them into groups."""

from collections.abc import Callable

from scheduler_svc.core.parts.waiting_deadlines import Deadlines
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import CoreState
from svc_common.errors import AlreadyExists, InvalidArgument, OutOfRange

Grouping = Callable[[Request], None]


class RequestIntake:
    """Validates a request and groups its samples.

    `refuses_misfits`: reject at once what can never run (v1); otherwise it ends as ignored when it reaches the
    head of the queue (v0). `deadlines`: None = deadlines are ignored.
    """

    def __init__(self, grouping: Grouping, deadlines: Deadlines | None, *, refuses_misfits: bool) -> None:
        self._grouping = grouping
        self.deadlines = deadlines
        self._refuses_misfits = refuses_misfits

    def check(self, request: Request, state: CoreState) -> None:
        """Validate and group a request.

        AlreadyExists for an id in use, InvalidArgument for invalid fields, OutOfRange when it can never run,
        DeadlineExceeded when it cannot finish in time.
        """
        if request.request_id in state.requests:
            raise AlreadyExists(f"request {request.request_id} is running already", reason="DUPLICATE_REQUEST")
        num_tokens = len(request.prompt_token_ids) + max(request.committed_counts, default=len(request.committed))
        if not num_tokens:
            raise InvalidArgument.field("prompt", "has no tokens")
        self._check_samples(request, state)
        if self._refuses_misfits:
            self._check_fits(num_tokens, state)
        if self.deadlines is not None:
            self.deadlines.take(request, state)
        self._grouping(request)

    @staticmethod
    def _check_samples(request: Request, state: CoreState) -> None:
        num_samples, counts = request.num_samples, request.committed_counts
        if not 1 <= request.n <= num_samples:
            raise InvalidArgument.field("best_of", f"is {num_samples}, must be at least n = {request.n} >= 1")
        if num_samples > state.limits.max_num_seqs:
            raise InvalidArgument.field(
                "n", f"asks for {num_samples} samples; {state.limits.max_num_seqs} sequences can run at a time"
            )
        if counts and (len(counts) != num_samples or sum(counts) != len(request.committed)):
            raise InvalidArgument.field(
                "committed_counts", "must have one count for each sample, of all committed tokens"
            )
        is_ranked = request.beam is not None or num_samples > request.n
        if request.committed and (is_ranked or (num_samples > 1 and not counts)):
            raise InvalidArgument.field(
                "committed", "must be empty for samples that are ranked: they start from the prompt"
            )

    @staticmethod
    def _check_fits(num_tokens: int, state: CoreState) -> None:
        longest = min(state.limits.max_model_len - 1, state.cache.capacity_tokens)
        if num_tokens > longest:
            raise OutOfRange(
                f"{num_tokens} tokens are more than the {longest} that a prompt may have here "
                f"(model length {state.limits.max_model_len}, cache {state.cache.capacity_tokens} tokens)",
                reason="PROMPT_TOO_LONG",
                metadata={"limit": str(longest), "num_tokens": str(num_tokens)},
            )
