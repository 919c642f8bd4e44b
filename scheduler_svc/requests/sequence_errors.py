"""Errors that requests end with, by the core's error text of a sequence."""

from protos.common.v1 import common_pb2
from scheduler_svc.requests.submission import Submission
from scheduler_svc.workers import row_failures
from svc_common import constraints
from svc_common.errors import Internal, QuireError


def sequence_error(why: str, submission: Submission) -> QuireError:
    """InvalidArgument naming the fields if the request's own constraints were the cause, else Internal."""
    sampling = submission.sampling.options or common_pb2.ResolvedSampling()
    fields = constraints.constraint_fields(sampling, submission.stop.min_tokens)
    grammar = constraints.grammar_field(sampling)
    if why == row_failures.NO_TOKEN_LEFT and fields:
        return constraints.no_token_left(fields, "further")
    if why == row_failures.GRAMMAR_LIMIT and grammar:
        return constraints.grammar_limit([grammar])
    if why.startswith(row_failures.MASK_BUDGET) and grammar:
        return constraints.mask_budget([grammar], float(why.removeprefix(row_failures.MASK_BUDGET)))
    return Internal(why, reason="STEP_FAILED")
