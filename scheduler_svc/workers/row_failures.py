"""Texts for why a worker yielded no token for a sequence, from its row flags; recordings and the step log contain them."""

from protos.worker.v1 import worker_pb2

NOT_FINITE = "the model's output was not finite (NaN or infinity)"
NO_TOKEN_LEFT = "no token was left that the request's grammar or other constraints allow"
GRAMMAR_LIMIT = "its grammar reached a limit of the grammar engine"
MASK_BUDGET = (
    "the masks of its grammar took more CPU time than the worker's --mask-budget-ms allows, in milliseconds a token: "
)
"""Followed by the limit."""


def why(flags: int, mask_budget_ms: float) -> str:
    """Text for nonzero RowFlag bits; `mask_budget_ms` as the worker reports it."""
    if flags & worker_pb2.ROW_FLAG_NOT_FINITE:
        return NOT_FINITE
    if flags & worker_pb2.ROW_FLAG_GRAMMAR_LIMIT:
        return GRAMMAR_LIMIT
    if flags & worker_pb2.ROW_FLAG_MASK_BUDGET:
        return f"{MASK_BUDGET}{mask_budget_ms:g}"
    return NO_TOKEN_LEFT
