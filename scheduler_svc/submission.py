"""From a gateway's `Submit` to a request the core can queue: validated again here, because a peer is not to be trusted.

`parse` needs nothing but the message; `to_core` checks what depends on the model, once a worker has said what it is.
"""

import math
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from scheduler_svc.core.request import Request, StopRules
from scheduler_svc.row_planner import RowSampling
from svc_common import columns
from svc_common.clock import NS_PER_S
from svc_common.errors import FieldViolation, InvalidArgument, OutOfRange

MAX_ID_LENGTH = 512
MAX_STATE_BYTES = 2**20
MAX_STOP_TOKENS = 4_096


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as submitted, well formed. `prompt` and `committed`: int32 token ids. Times on this process' monotonic clock."""

    request_id: str
    tenant: str
    prompt: NDArray[np.int32]
    committed: NDArray[np.int32]
    sampling: RowSampling
    stop: StopRules
    priority: int
    arrival_ns: int
    deadline_ns: int | None
    cache_salt: str
    no_cache_reuse: bool
    resumable: bool
    resubmitted: bool
    frontend_state: bytes

    @property
    def key(self) -> tuple[str, str]:
        """What makes it the same request: tenant and public id."""
        return self.tenant, self.request_id


def parse(submit: engine_pb2.Submit, now_ns: int) -> Submission:
    """The submission in `submit`. InvalidArgument with every field that is wrong."""
    _refuse(_violations(submit))
    prompt = columns.unpack(submit.token_ids, "token_ids", minimum=0)
    committed = _committed(submit)
    if not len(prompt):
        _refuse([FieldViolation("token_ids", "has no tokens; a prompt needs at least one")])
    return Submission(
        request_id=submit.request_id,
        tenant=submit.tenant,
        prompt=prompt,
        committed=committed,
        sampling=_sampling(submit),
        stop=_stop_rules(submit.stop),
        priority=submit.priority,
        arrival_ns=now_ns - submit.arrival_age_ns,
        deadline_ns=now_ns + submit.remaining_ns if submit.remaining_ns else None,
        cache_salt=submit.cache_salt,
        no_cache_reuse=submit.no_cache_reuse,
        resumable=submit.resumable,
        resubmitted=submit.resubmitted,
        frontend_state=submit.frontend_state,
    )


def to_core(submission: Submission, core_id: str, tokens: list[int], limits: common_pb2.ModelLimits) -> Request:
    """The core's request, going on after `tokens` of output. InvalidArgument or OutOfRange where the model cannot take it."""
    _check_vocabulary(submission.prompt, "token_ids", limits)
    _check_vocabulary(np.asarray(tokens, dtype=columns.I32), "committed.token_ids", limits)
    _check_length(submission, limits)
    stop = submission.stop
    return Request(
        request_id=core_id,
        prompt_token_ids=submission.prompt.tolist(),
        stop=StopRules(
            max_tokens=stop.max_tokens,
            min_tokens=stop.min_tokens,
            ignore_eos=stop.ignore_eos,
            eos_token_ids=frozenset(limits.eos_token_ids),
            stop_token_ids=stop.stop_token_ids,
        ),
        arrival_time=submission.arrival_ns / NS_PER_S,
        priority=submission.priority,
        cache_salt=submission.cache_salt,
        no_cache_reuse=submission.no_cache_reuse,
        deadline=None if submission.deadline_ns is None else submission.deadline_ns / NS_PER_S,
        committed=list(tokens),
    )


def _refuse(violations: list[FieldViolation]) -> None:
    if violations:
        text = "; ".join(f"{v.field}: {v.description}" for v in violations)
        raise InvalidArgument(text, reason="INVALID_FIELD", violations=violations)


def _violations(submit: engine_pb2.Submit) -> list[FieldViolation]:
    sampling, stop = submit.sampling, submit.stop
    checks = [
        ("request_id", 0 < len(submit.request_id) <= MAX_ID_LENGTH, f"must have 1 to {MAX_ID_LENGTH} characters"),
        ("tenant", len(submit.tenant) <= MAX_ID_LENGTH, f"must have at most {MAX_ID_LENGTH} characters"),
        ("cache_salt", len(submit.cache_salt) <= MAX_ID_LENGTH, f"must have at most {MAX_ID_LENGTH} characters"),
        ("frontend_state", len(submit.frontend_state) <= MAX_STATE_BYTES, f"must have at most {MAX_STATE_BYTES} bytes"),
        ("num_choices", submit.num_choices <= 1, f"is {submit.num_choices}; only 1 is served so far"),
        ("sampling", submit.HasField("sampling"), "is missing"),
        ("sampling.temperature", _at_least(sampling.temperature, 0), "must be a finite number, 0 or more"),
        ("sampling.top_p", not submit.HasField("sampling") or 0 < sampling.top_p <= 1, "must be above 0 and at most 1"),
        ("sampling.top_k", sampling.top_k < 2**31, "must be below 2^31"),
        ("stop.max_tokens", 0 < stop.max_tokens < 2**31, "must be at least 1"),
        ("stop.min_tokens", stop.min_tokens <= stop.max_tokens, "must not be more than stop.max_tokens"),
        (
            "stop.stop_token_ids",
            len(stop.stop_token_ids) <= MAX_STOP_TOKENS,
            f"must have at most {MAX_STOP_TOKENS} ids",
        ),
    ]
    return [FieldViolation(field, what) for field, good, what in checks if not good]


def _at_least(value: float, least: float) -> bool:
    return math.isfinite(value) and value >= least


def _committed(submit: engine_pb2.Submit) -> NDArray[np.int32]:
    if len(submit.committed) > 1 or any(c.choice != 0 for c in submit.committed):
        _refuse([FieldViolation("committed", "must name choice 0 once at most")])
    data = submit.committed[0].token_ids if submit.committed else b""
    return columns.unpack(data, "committed.token_ids", minimum=0)


def _sampling(submit: engine_pb2.Submit) -> RowSampling:
    s = submit.sampling
    return RowSampling(
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        seed=s.seed,
        logprobs=s.logprobs,
        trace=submit.trace if submit.trace.traceparent else None,
    )


def _stop_rules(stop: common_pb2.StopRules) -> StopRules:
    return StopRules(
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        ignore_eos=stop.ignore_eos,
        stop_token_ids=frozenset(stop.stop_token_ids),
    )


def _check_vocabulary(ids: NDArray[np.int32], field: str, limits: common_pb2.ModelLimits) -> None:
    if len(ids) and int(ids.max()) >= limits.vocab_size:
        _refuse([FieldViolation(field, f"has id {int(ids.max())}; the vocabulary has {limits.vocab_size} entries")])


def _check_length(submission: Submission, limits: common_pb2.ModelLimits) -> None:
    longest = limits.max_model_len - 1
    if len(submission.prompt) > longest:
        too_long(len(submission.prompt), longest)


def too_long(num_tokens: int, longest: int) -> NoReturn:
    """OutOfRange with the limit (R23: never reported as a finish reason)."""
    raise OutOfRange(
        f"the prompt has {num_tokens} tokens; the longest this model takes is {longest}: shorten the prompt",
        reason="PROMPT_TOO_LONG",
        metadata={"limit": str(longest), "num_tokens": str(num_tokens)},
    )
