"""Limits of sampling options that cost memory or time; the scheduler checks them even though gateways do."""

import math

import numpy as np

from protos.common.v1 import common_pb2
from svc_common import wire_arrays

MAX_TOP_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 200_000
MAX_LOGIT_BIASES = 1_024
MAX_LOGIT_BIAS = 100.0
MAX_ALLOWED_IDS = 1_000_000
MAX_BAD_WORDS = 2_048
"""Token sequences; one word of the API becomes several."""
MAX_BAD_WORD_TOKENS = 1_024
MAX_GRAMMAR_BYTES = 256 * 1_024
_FINITE = "must be finite"
_FEW_LOGPROBS = f"must be at most {MAX_TOP_LOGPROBS}"
_SIZE = wire_arrays.I32.itemsize

Check = tuple[str, bool, str]
"""Field, whether it is valid, and what is wrong if it is not."""


def checks(sampling: common_pb2.ResolvedSampling, num_prompt_tokens: int) -> list[Check]:
    """Checks of the fields that are set."""
    has_biases = bool(sampling.logit_bias_ids or sampling.logit_biases)
    return [
        ("sampling.num_top_logprobs", sampling.num_top_logprobs <= MAX_TOP_LOGPROBS, _FEW_LOGPROBS),
        *(_prompt_logprobs(sampling, num_prompt_tokens) if sampling.HasField("num_prompt_logprobs") else ()),
        ("sampling.min_p", math.isfinite(sampling.min_p), _FINITE),
        ("sampling.repetition_penalty", math.isfinite(sampling.repetition_penalty), _FINITE),
        ("sampling.presence_penalty", math.isfinite(sampling.presence_penalty), _FINITE),
        ("sampling.frequency_penalty", math.isfinite(sampling.frequency_penalty), _FINITE),
        *(_tokens(sampling) if has_biases or sampling.allowed_token_ids or sampling.bad_words else ()),
        (
            "sampling.grammar",
            len(sampling.grammar.text.encode()) <= MAX_GRAMMAR_BYTES,
            f"must have at most {MAX_GRAMMAR_BYTES} bytes",
        ),
    ]


def _prompt_logprobs(sampling: common_pb2.ResolvedSampling, num_prompt_tokens: int) -> list[Check]:
    in_all = num_prompt_tokens * (1 + sampling.num_prompt_logprobs)
    return [
        ("sampling.num_prompt_logprobs", sampling.num_prompt_logprobs <= MAX_TOP_LOGPROBS, _FEW_LOGPROBS),
        (
            "sampling.num_prompt_logprobs",
            in_all <= MAX_PROMPT_LOGPROBS,
            f"makes {in_all} log probabilities; at most {MAX_PROMPT_LOGPROBS} are given",
        ),
    ]


def _tokens(sampling: common_pb2.ResolvedSampling) -> list[Check]:
    num_biases, words = len(sampling.logit_bias_ids) // _SIZE, sampling.bad_words
    return [
        ("sampling.logit_bias_ids", num_biases <= MAX_LOGIT_BIASES, f"must be at most {MAX_LOGIT_BIASES}"),
        (
            "sampling.logit_biases",
            len(sampling.logit_biases) == len(sampling.logit_bias_ids) and _are_biases(sampling.logit_biases),
            f"must be one for each id, finite and in [{-MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]",
        ),
        ("sampling.logit_bias_ids", _are_ids(sampling.logit_bias_ids), "must be token ids, int32 and 0 or more"),
        (
            "sampling.allowed_token_ids",
            len(sampling.allowed_token_ids) <= MAX_ALLOWED_IDS * _SIZE and _are_ids(sampling.allowed_token_ids),
            f"must be at most {MAX_ALLOWED_IDS} token ids, int32 and 0 or more",
        ),
        ("sampling.bad_words", len(words) <= MAX_BAD_WORDS, f"must be at most {MAX_BAD_WORDS} sequences"),
        (
            "sampling.bad_words",
            all(_is_word(word.token_ids) for word in words[:MAX_BAD_WORDS]),
            f"must have 1 to {MAX_BAD_WORD_TOKENS} token ids each, int32 and 0 or more",
        ),
    ]


def _is_word(data: bytes) -> bool:
    return 0 < len(data) <= MAX_BAD_WORD_TOKENS * _SIZE and _are_ids(data)


def _are_ids(data: bytes) -> bool:
    if len(data) % _SIZE:
        return False
    return not data or int(np.frombuffer(data, wire_arrays.I32).min()) >= 0


def _are_biases(data: bytes) -> bool:
    if len(data) % wire_arrays.F32.itemsize:
        return False
    return bool((np.abs(np.frombuffer(data, wire_arrays.F32)) <= MAX_LOGIT_BIAS).all())
