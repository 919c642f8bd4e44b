"""Checks of sampling parameters, beams and logprobs. Pure; no tokenizer, no grammars (see `grammars`).

Limits are those of OpenAI and vLLM where they have any. A beam search uses the logprobs unchanged: parameters
that would reshape the distribution are refused with it, as in vLLM, rather than ignored.
"""

import math

from gateway_svc.checks.violations import Violations
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb
from svc_common.errors import InvalidArgument

MAX_TEMPERATURE = 10.0
MAX_CHOICES = 128
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0
MAX_LENGTH_PENALTY = 10.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 256
MAX_TOP_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 200_000
"""Limit over all positions together, since they are sent in one message."""

_FLOATS = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
}
# For beams: values that have no effect, besides absence.
_NEUTRAL_FOR_BEAMS: dict[str, tuple[float, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0,),
    "min_p": (0,),
}


def num_choices(sampling: pb.SamplingParams) -> int:
    """Number of choices returned."""
    return sampling.n if sampling.HasField("n") else 1


def check_sampling(sampling: pb.SamplingParams, limits: common_pb2.ModelLimits, found: Violations) -> None:
    """Check everything in SamplingParams."""
    _check_shape(sampling, found)
    if sampling.HasField("n") or sampling.HasField("best_of"):
        _check_choices(sampling, found)
    if sampling.logit_bias or sampling.allowed_token_ids:
        _check_tokens(sampling, limits, found)
    for i, word in enumerate(sampling.bad_words[:MAX_BAD_WORDS]):
        good = word.strip() and len(word) <= MAX_BAD_WORD_CHARS
        if not good:
            found.add(f"sampling.bad_words[{i}]", f"must have 1 to {MAX_BAD_WORD_CHARS} characters, not spaces alone")
    num_words = len(sampling.bad_words)
    if num_words > MAX_BAD_WORDS:
        found.add("sampling.bad_words", f"has {num_words} words; at most {MAX_BAD_WORDS} are allowed")
    if sampling.HasField("beam"):
        _check_beam(sampling, found)


def check_response(response: pb.ResponseOptions, found: Violations) -> None:
    """Check the number of logprobs requested."""
    for name in ("num_top_logprobs", "num_prompt_logprobs"):
        count = getattr(response, name)
        if count > MAX_TOP_LOGPROBS:
            found.add(f"response.{name}", f"is {count}; at most {MAX_TOP_LOGPROBS} are given")


def check_prompt_logprobs(response: pb.ResponseOptions, num_tokens: int) -> None:
    """Raise InvalidArgument if the requested logprobs of a prompt of `num_tokens` are too many for one message."""
    num_logprobs = num_tokens * (1 + response.num_prompt_logprobs)
    if num_logprobs > MAX_PROMPT_LOGPROBS:
        raise InvalidArgument.field(
            "response.num_prompt_logprobs",
            f"is {response.num_prompt_logprobs}, which makes {num_logprobs} log probabilities for {num_tokens} tokens; at most "
            f"{MAX_PROMPT_LOGPROBS} are given: ask for fewer, or send a shorter prompt",
        )


def _check_shape(sampling: pb.SamplingParams, found: Violations) -> None:
    for name, (least, most) in _FLOATS.items():
        value = getattr(sampling, name)
        good = math.isfinite(value) and least <= value <= most
        if not good:
            found.add(f"sampling.{name}", f"is {value:g}; must be finite and lie in [{least:g}, {most:g}]")
    if sampling.HasField("top_p"):
        good = math.isfinite(sampling.top_p) and 0 < sampling.top_p <= 1
        if not good:
            found.add("sampling.top_p", f"is {sampling.top_p:g}; must lie in (0, 1]")
    if sampling.HasField("repetition_penalty"):
        penalty = sampling.repetition_penalty
        good = math.isfinite(penalty) and 0 < penalty <= MAX_REPETITION_PENALTY
        text = f"is {penalty:g}; must lie in (0, {MAX_REPETITION_PENALTY:g}], 1 = off"
        if not good:
            found.add("sampling.repetition_penalty", text)


def _check_choices(sampling: pb.SamplingParams, found: Violations) -> None:
    n = num_choices(sampling)
    best_of = sampling.best_of if sampling.HasField("best_of") else n
    if not 1 <= n <= MAX_CHOICES:
        found.add("sampling.n", f"is {n}; must lie between 1 and {MAX_CHOICES}")
    elif not n <= best_of <= MAX_CHOICES:
        found.add("sampling.best_of", f"is {best_of}; must lie between n = {n} and {MAX_CHOICES}")


def _check_tokens(sampling: pb.SamplingParams, limits: common_pb2.ModelLimits, found: Violations) -> None:
    biases = sampling.logit_bias
    if len(biases) > MAX_LOGIT_BIASES:
        found.add("sampling.logit_bias", f"has {len(biases)} entries; at most {MAX_LOGIT_BIASES} are allowed")
    for token_id, bias in sorted(biases.items()):
        if token_id >= limits.vocab_size:
            found.add(
                f"sampling.logit_bias[{token_id}]", f"names no token; the vocabulary has {limits.vocab_size}, from 0"
            )
        elif not abs(bias) <= MAX_LOGIT_BIAS:
            text = f"is {bias:g}; must lie in [{-MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]"
            found.add(f"sampling.logit_bias[{token_id}]", text)
    found.add_unknown_ids(sampling.allowed_token_ids, "sampling.allowed_token_ids", limits)


def _check_beam(sampling: pb.SamplingParams, found: Violations) -> None:
    for name, neutral in _NEUTRAL_FOR_BEAMS.items():
        value = getattr(sampling, name)
        if sampling.HasField(name) and value not in neutral:
            found.add(f"sampling.{name}", f"is {value:g}; a beam search does not sample: leave it out, or `beam`")
    penalty = sampling.beam.length_penalty
    good = math.isfinite(penalty) and abs(penalty) <= MAX_LENGTH_PENALTY
    text = f"is {penalty:g}; must lie in [{-MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]"
    if not good:
        found.add("sampling.beam.length_penalty", text)
    stop = sampling.beam.early_stopping
    known = stop in common_pb2.BeamStop.values()
    if not known:
        found.add("sampling.beam.early_stopping", f"is {stop}, which is no BeamStop")
