"""Parsing and validation of a gateway's `Submit` into a request for the core. Gateways are not trusted, so all is checked again.

`parse` needs only the message; `to_core` checks what depends on the model, once a worker has reported it.
"""

import itertools
import math
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import BeamRules, StopRules
from scheduler_svc.requests import sampling_limits
from scheduler_svc.requests.choice_output import ChoiceOutput, ChoiceOutputs, PromptLogprobs
from scheduler_svc.worker_values import RowSampling, TokenExtras
from svc_common import wire_arrays
from svc_common.clock import NS_PER_S
from svc_common.errors import FieldViolation, InvalidArgument, OutOfRange

MAX_ID_LENGTH = 512
MAX_STATE_BYTES = 2**20
MAX_STOP_TOKENS = 4_096
MAX_CHOICES = 128
MAX_AGE_NS = 7 * 24 * 3_600 * NS_PER_S
_NO_TOKENS = np.zeros(0, wire_arrays.I32)
_BEAM_STOPS: dict[int, bool | str] = {
    common_pb2.BEAM_STOP_WHEN_ENOUGH: True,
    common_pb2.BEAM_STOP_NEVER: "never",
}


@dataclass(frozen=True, slots=True)
class Submission:
    """A validated request. `prompt` and `committed` (by choice): int32 token ids. Times are on this process's monotonic clock.

    `num_choices` of `best_of` sequences are returned; `beam`: the sequences are beams. `num_prompt_logprobs`:
    None = not wanted. `committed_extras`: log probabilities of `committed`, if sent. `message`: what was sent
    of a resumable request, for readers that reconnect, without handle, committed tokens, gateway state and
    resubmission mark.
    """

    request_id: str
    tenant: str
    prompt: NDArray[np.int32]
    committed: list[NDArray[np.int32]]
    sampling: RowSampling
    stop: StopRules
    num_choices: int
    best_of: int
    beam: BeamRules | None
    num_top_logprobs: int
    num_prompt_logprobs: int | None
    adapter: str
    priority: int
    arrival_ns: int
    deadline_ns: int | None
    cache_salt: str
    no_cache_reuse: bool
    resumable: bool
    resubmitted: bool
    frontend_state: bytes
    committed_extras: list[TokenExtras]
    message: engine_pb2.Submit | None = field(repr=False)

    @property
    def key(self) -> tuple[str, str]:
        """Identity of the request: tenant and public id."""
        return self.tenant, self.request_id

    def row_sampling(self, limits: common_pb2.ModelLimits, adapter_id: int = 0) -> RowSampling:
        """Sampling of the request's rows for a model, which adds its EOS tokens to those banned below `min_tokens`."""
        sampling = replace(self.sampling, adapter_id=adapter_id) if adapter_id else self.sampling
        if self.beam is not None:
            # Up to `ends` tokens may end a beam in one step, and best_of beams must be able to go on.
            ends = len(self.stop.stop_token_ids) + (0 if self.stop.ignore_eos else len(limits.eos_token_ids))
            sampling = replace(sampling, num_candidates=min(max(2, 1 + ends) * self.best_of, limits.vocab_size))
        if sampling.min_tokens and not self.stop.ignore_eos:
            return replace(sampling, end_ids=(*sampling.end_ids, *limits.eos_token_ids))
        return sampling

    def new_output(self) -> ChoiceOutputs:
        """Initial output: the committed tokens."""
        choices = [ChoiceOutput() for _ in range(self.num_choices)]
        wants = {"logprobs": self.sampling.logprobs, "tops": self.num_top_logprobs > 0}
        for choice, tokens, extras in zip(choices, self.committed, self.committed_extras, strict=False):
            choice.extend(tokens.tolist(), extras, **wants)
        output = ChoiceOutputs(choices, ranked=self.sampling.ranked)
        if self.num_prompt_logprobs is not None:
            output.prompt = PromptLogprobs.of(len(self.prompt), self.num_prompt_logprobs)
        return output


def parse(submit: engine_pb2.Submit, now_ns: int) -> Submission:
    """Validate and convert a Submit. Raises InvalidArgument naming every wrong field."""
    checks = _checks(submit)
    if not all(map(itemgetter(1), checks)):
        _refuse([FieldViolation(field, what) for field, good, what in checks if not good])
    prompt = wire_arrays.unpack(submit.token_ids, "token_ids", minimum=0)
    committed, extras = _committed(submit) if submit.committed else ([], [])
    if not len(prompt):
        _refuse([FieldViolation("token_ids", "has no tokens; a prompt needs at least one")])
    num_choices = max(1, submit.num_choices)
    best_of = max(num_choices, submit.best_of)
    return Submission(
        request_id=submit.request_id,
        tenant=submit.tenant,
        prompt=prompt,
        committed=committed,
        sampling=_sampling(submit, num_choices, best_of),
        stop=_stop_rules(submit.stop),
        num_choices=num_choices,
        best_of=best_of,
        beam=_beam_rules(submit.beam) if submit.HasField("beam") else None,
        num_top_logprobs=submit.sampling.num_top_logprobs,
        num_prompt_logprobs=submit.sampling.num_prompt_logprobs
        if submit.sampling.HasField("num_prompt_logprobs")
        else None,
        adapter=submit.adapter,
        priority=submit.priority,
        arrival_ns=now_ns - submit.arrival_age_ns,
        deadline_ns=now_ns + submit.remaining_ns if submit.remaining_ns else None,
        cache_salt=submit.cache_salt,
        no_cache_reuse=submit.no_cache_reuse,
        resumable=submit.resumable,
        resubmitted=submit.resubmitted,
        frontend_state=submit.frontend_state,
        committed_extras=extras,
        message=_for_later_readers(submit) if submit.resumable else None,
    )


def to_core(
    submission: Submission, core_id: str, output: ChoiceOutputs, limits: common_pb2.ModelLimits, lora_id: int = 0
) -> Request:
    """The core's request, continuing after the output delivered so far.

    Raises InvalidArgument or OutOfRange if the model cannot serve it. Ranked choices start from the prompt,
    since nothing of them was delivered.
    """
    choices = [] if output.ranked else output.choices
    runs = list(map(attrgetter("tokens"), choices))
    tokens = list(itertools.chain.from_iterable(runs))
    _check_vocabulary(int(submission.prompt.max()), "token_ids", limits)
    if tokens:
        _check_vocabulary(max(tokens), "committed.token_ids", limits)
    longest = limits.max_model_len - 1
    if len(submission.prompt) > longest:
        _too_long(len(submission.prompt), longest)
    stop = submission.stop
    needs_states = submission.num_prompt_logprobs is not None or submission.sampling.task
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
        tenant=submission.tenant,
        cache_salt=submission.cache_salt,
        no_cache_reuse=submission.no_cache_reuse or bool(needs_states),
        n=submission.num_choices,
        best_of=submission.best_of,
        beam=submission.beam,
        lora_id=lora_id,
        deadline=None if submission.deadline_ns is None else submission.deadline_ns / NS_PER_S,
        committed=tokens,
        committed_counts=list(map(len, runs)) if len(runs) > 1 and tokens else [],
        over=[i for i, choice in enumerate(choices) if choice.ending is not None],
    )


def _refuse(violations: list[FieldViolation]) -> NoReturn:
    text = "; ".join(f"{v.field}: {v.description}" for v in violations)
    raise InvalidArgument(text, reason="INVALID_FIELD", violations=violations)


def _checks(submit: engine_pb2.Submit) -> list[sampling_limits.Check]:
    sampling, stop = submit.sampling, submit.stop
    return [
        ("request_id", 0 < len(submit.request_id) <= MAX_ID_LENGTH, f"must have 1 to {MAX_ID_LENGTH} characters"),
        ("tenant", len(submit.tenant) <= MAX_ID_LENGTH, f"must have at most {MAX_ID_LENGTH} characters"),
        ("cache_salt", len(submit.cache_salt) <= MAX_ID_LENGTH, f"must have at most {MAX_ID_LENGTH} characters"),
        ("frontend_state", len(submit.frontend_state) <= MAX_STATE_BYTES, f"must have at most {MAX_STATE_BYTES} bytes"),
        ("num_choices", submit.num_choices <= MAX_CHOICES, f"must be at most {MAX_CHOICES}"),
        (
            "best_of",
            not submit.best_of or max(1, submit.num_choices) <= submit.best_of <= MAX_CHOICES,
            f"must be num_choices ({submit.num_choices}) to {MAX_CHOICES}",
        ),
        ("beam.length_penalty", math.isfinite(submit.beam.length_penalty), "must be finite"),
        ("task", not (submit.task and (submit.best_of > 1 or submit.num_choices > 1)), "a vector has one choice"),
        ("sampling", submit.HasField("sampling"), "is missing"),
        ("sampling.temperature", 0 <= sampling.temperature < math.inf, "must be a finite number, 0 or more"),
        ("sampling.top_p", not submit.HasField("sampling") or 0 < sampling.top_p <= 1, "must be above 0 and at most 1"),
        ("sampling.top_k", sampling.top_k < 2**31, "must be below 2^31"),
        ("remaining_ns", submit.remaining_ns <= MAX_AGE_NS, "must be at most a week"),
        ("arrival_age_ns", submit.arrival_age_ns <= MAX_AGE_NS, "must be at most a week"),
        ("adapter", len(submit.adapter) <= MAX_ID_LENGTH, f"must have at most {MAX_ID_LENGTH} characters"),
        ("stop.max_tokens", 0 < stop.max_tokens < 2**31, "must be at least 1"),
        ("stop.min_tokens", stop.min_tokens <= stop.max_tokens, "must not be more than stop.max_tokens"),
        (
            "stop.stop_token_ids",
            len(stop.stop_token_ids) <= MAX_STOP_TOKENS,
            f"must have at most {MAX_STOP_TOKENS} ids",
        ),
        *sampling_limits.checks(sampling, len(submit.token_ids) // wire_arrays.I32.itemsize),
    ]


def _for_later_readers(submit: engine_pb2.Submit) -> engine_pb2.Submit:
    kept = engine_pb2.Submit()
    kept.CopyFrom(submit)
    for name in ("handle", "committed", "frontend_state", "resubmitted"):
        kept.ClearField(name)
    return kept


def _committed(submit: engine_pb2.Submit) -> tuple[list[NDArray[np.int32]], list[TokenExtras]]:
    choices = [c.choice for c in submit.committed]
    if len(set(choices)) < len(choices) or any(choice >= max(1, submit.num_choices) for choice in choices):
        _refuse([FieldViolation("committed", "must name each choice once at most, of those that there are")])
    tokens = {c.choice: wire_arrays.unpack(c.token_ids, "committed.token_ids", minimum=0) for c in submit.committed}
    extras = {c.choice: _extras(c, len(tokens[c.choice])) for c in submit.committed}
    numbers = range(max(tokens, default=-1) + 1)
    return [tokens.get(i, _NO_TOKENS) for i in numbers], [extras.get(i, TokenExtras()) for i in numbers]


def _extras(committed: engine_pb2.CommittedTokens, num_tokens: int) -> TokenExtras:
    """Log probabilities sent beside committed tokens: for each token, or for none."""
    length = num_tokens if committed.logprobs else 0
    logprobs = wire_arrays.unpack(committed.logprobs, "committed.logprobs", wire_arrays.F32, length=length)
    length = num_tokens if committed.top_counts else 0
    counts = wire_arrays.unpack(committed.top_counts, "committed.top_counts", wire_arrays.U32, length=length)
    ids = wire_arrays.split(
        wire_arrays.unpack(committed.top_token_ids, "committed.top_token_ids"), counts, "committed.top_token_ids"
    )
    flat = wire_arrays.unpack(committed.top_logprobs, "committed.top_logprobs", wire_arrays.F32)
    values = wire_arrays.split(flat, counts, "committed.top_logprobs")
    tops = [list(zip(i.tolist(), v.tolist(), strict=True)) for i, v in zip(ids, values, strict=True)]
    return TokenExtras(logprobs.tolist(), tops)


def _sampling(submit: engine_pb2.Submit, num_choices: int, best_of: int) -> RowSampling:
    s, has_beam, stop = submit.sampling, submit.HasField("beam"), submit.stop
    ends = () if not stop.min_tokens else tuple(stop.stop_token_ids)
    return RowSampling(
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        seed=s.seed,
        logprobs=s.logprobs,
        trace=submit.trace if submit.trace.traceparent else None,
        options=rare_options(s),
        min_tokens=stop.min_tokens,
        end_ids=ends,
        ranked=has_beam or best_of > num_choices,
        num_candidates=best_of if has_beam else 0,
        task=submit.task,
    )


def rare_options(sampling: common_pb2.ResolvedSampling) -> common_pb2.ResolvedSampling | None:
    """The sampling options that have no column in `AddedRows`; None if there are none."""
    rest = common_pb2.ResolvedSampling()
    rest.CopyFrom(sampling)
    for name in ("temperature", "top_p", "top_k", "seed", "logprobs"):
        rest.ClearField(name)
    if rest.repetition_penalty == 1:
        rest.ClearField("repetition_penalty")
    return rest if rest.ByteSize() else None


def _beam_rules(beam: common_pb2.BeamRules) -> BeamRules:
    return BeamRules(beam.length_penalty, _BEAM_STOPS.get(beam.stop, False))


def _stop_rules(stop: common_pb2.StopRules) -> StopRules:
    return StopRules(
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        ignore_eos=stop.ignore_eos,
        stop_token_ids=frozenset(stop.stop_token_ids),
    )


def _check_vocabulary(highest: int, field: str, limits: common_pb2.ModelLimits) -> None:
    if highest >= limits.vocab_size:
        _refuse([FieldViolation(field, f"has id {highest}; the vocabulary has {limits.vocab_size} entries")])


def _too_long(num_tokens: int, longest: int) -> NoReturn:
    """Raise OutOfRange with the limit; a too long prompt is never reported as a finish reason."""
    raise OutOfRange(
        f"the prompt has {num_tokens} tokens; the longest this model takes is {longest}: shorten the prompt",
        reason="PROMPT_TOO_LONG",
        metadata={"limit": str(longest), "num_tokens": str(num_tokens)},
    )
