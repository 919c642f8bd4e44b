"""Check, before a request runs, that its constraints allow at least one first token. Pure.

Constraints that forbid every token later in the output fail the request at the worker, with the same reason.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protos.common.v1 import common_pb2
from svc_common import constraints, wire_arrays


class FirstTokens(Protocol):
    """Interface needed of the model's grammar compiler (`text_model.TextModel`)."""

    def first_tokens(self, grammar: common_pb2.Grammar) -> NDArray[np.bool_]:
        """Return bool [vocabulary]: tokens that an output of a grammar, known to compile, may begin with."""


def check_first_token(
    sampling: common_pb2.ResolvedSampling,
    stop: common_pb2.StopRules,
    limits: common_pb2.ModelLimits,
    model: FirstTokens,
) -> None:
    """Raise InvalidArgument naming all constraints of the request if no first token satisfies them together."""
    # Bad words or min_tokens alone never forbid the whole vocabulary, and a grammar that matches nothing does
    # not compile.
    if not (sampling.allowed_token_ids or sampling.grammar.kind):
        return
    fields = constraints.constraint_fields(sampling, stop.min_tokens)
    if len(fields) < 2:
        return
    opens = np.ones(limits.vocab_size, np.bool_)
    opens[_closed(sampling, stop, limits)] = False
    if sampling.allowed_token_ids:
        allowed = np.frombuffer(sampling.allowed_token_ids, wire_arrays.I32)
        opens[np.setdiff1d(np.arange(limits.vocab_size), allowed)] = False
    if sampling.grammar.kind and opens.any():
        opens &= model.first_tokens(sampling.grammar)
    if not opens.any():
        raise constraints.no_token_left(fields, "first")


def _closed(
    sampling: common_pb2.ResolvedSampling, stop: common_pb2.StopRules, limits: common_pb2.ModelLimits
) -> list[int]:
    """Token ids forbidden first: bad words of one token and, with min_tokens, tokens that would end the output."""
    words = [np.frombuffer(word.token_ids, wire_arrays.I32) for word in sampling.bad_words]
    closed = [int(word[0]) for word in words if len(word) == 1]
    if stop.min_tokens:
        closed += [*stop.stop_token_ids, *(() if stop.ignore_eos else limits.eos_token_ids)]
    return [token_id for token_id in closed if token_id < limits.vocab_size]
