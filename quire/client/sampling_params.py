"""Sampling and stop parameters of a request, with vLLM's names and defaults: values and their checks.

Not here: the wire format (quire.client.sampling_messages) and sampling itself (the worker's sampler).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.client.structured_outputs import StructuredOutputsParams
from quire.client.value_checks import is_number, is_whole, wrong, wrong_ids, wrong_number, wrong_texts
from svc_common.errors import FieldViolation, InvalidArgument

MAX_SEED = 2**64 - 1
MAX_UINT32 = 2**32 - 1
MAX_TEMPERATURE = 10.0
MAX_STOP_STRINGS = 16
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 64
MAX_LOGIT_BIAS = 100.0
MAX_REPETITION_PENALTY = 10.0
MAX_LENGTH_PENALTY = 10.0

_EARLY_STOPPING = (True, False, "never")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stop parameters. Raises InvalidArgument with one violation per invalid field.

    n: outputs returned, up to 128. best_of: sequences generated, of which the n most likely are returned at the end; None = n.
    temperature: 0 = greedy; up to 10. top_p: in (0, 1]. top_k: keep the k most likely; 0 or -1 = all. min_p: keep tokens at least
    this times as likely as the most likely. repetition_penalty: in (0, 10], 1 = off. For these None = the model's default.
    presence_penalty, frequency_penalty: in -2..2. logit_bias: {token id: -100..100}. allowed_token_ids: only these are sampled.
    bad_words: texts that never appear, with or without a space before them.
    seed: equal requests with equal seeds give equal outputs, in process and over gRPC; None = drawn for each request.
    max_tokens: most tokens to generate; 16 as in vLLM, None = up to the model's context.
    min_tokens: below this many tokens no stop condition but the length applies. stop: strings before which the output ends;
    not with best_of above n and beams.
    logprobs: the log probability of each chosen token (True or 0), and of the k most likely at its position (k up to 20).
    prompt_logprobs: of the prompt's tokens, and of the k most likely at each position; None = off.
    structured_outputs: what every output must match.
    use_beam_search: `best_of` beams compete by sum of log probabilities / length ** length_penalty; early_stopping: True = as soon
    as there are enough hypotheses, False = when none can win at its length, "never" = when none can at any (`BeamSearchParams`).
    """

    n: int = 1
    best_of: int | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    min_p: float | None = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    logprobs: bool | int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        wrong_ones = [FieldViolation(field, text) for field, text in self._violations() if text]
        if wrong_ones:
            raise InvalidArgument(
                "; ".join(f"{v.field}: {v.description}" for v in wrong_ones),
                reason="INVALID_FIELD",
                violations=wrong_ones,
            )

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(() if self.stop is None else self.stop)

    @property
    def wants_logprobs(self) -> bool:
        """True if log probabilities are requested (vLLM's 0 requests them, None does not)."""
        return self.logprobs is not None and self.logprobs is not False

    @property
    def num_top_logprobs(self) -> int:
        """Number of top tokens requested beside each chosen one."""
        return 0 if isinstance(self.logprobs, bool) or self.logprobs is None else int(self.logprobs)

    def _violations(self) -> Iterator[tuple[str, str]]:
        """Yield (field, what is wrong with it); the text is empty if nothing is."""
        yield from self._choices_problems()
        yield "temperature", wrong_number(self.temperature, 0, MAX_TEMPERATURE)
        yield "top_p", wrong(self.top_p, is_number, lambda x: 0 < x <= 1, "must be above 0 and at most 1")
        yield (
            "top_k",
            wrong(self.top_k, is_whole, lambda x: -1 <= x <= MAX_UINT32, "must be positive, or 0 (or -1) for all"),
        )
        yield "min_p", wrong_number(self.min_p, 0, 1)
        yield from self._penalty_problems()
        yield "logit_bias", self._logit_bias_problem()
        yield "allowed_token_ids", wrong_ids(self.allowed_token_ids)
        yield "bad_words", wrong_texts(self.bad_words, MAX_BAD_WORDS, alone=False)
        yield "seed", wrong(self.seed, is_whole, lambda x: 0 <= x <= MAX_SEED, "must be an unsigned number of 64 bits")
        yield from self._end_problems()
        yield "logprobs", _count_problem(None if isinstance(self.logprobs, bool) else self.logprobs)
        yield "prompt_logprobs", _count_problem(self.prompt_logprobs)
        given = self.structured_outputs
        yield "structured_outputs", "" if isinstance(given, StructuredOutputsParams | None) else f"is {given!r}"
        yield "use_beam_search", _flag_problem(self.use_beam_search)

    def _choices_problems(self) -> Iterator[tuple[str, str]]:
        good = is_whole(self.n) and 1 <= self.n <= MAX_CHOICES
        yield "n", "" if good else f"is {self.n!r}; must be in 1..{MAX_CHOICES}"
        least = self.n if good else 1
        text = f"must be in {least}..{MAX_CHOICES}, n at least"
        yield "best_of", wrong(self.best_of, is_whole, lambda x: least <= x <= MAX_CHOICES, text)

    def _penalty_problems(self) -> Iterator[tuple[str, str]]:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            yield name, wrong_number(value, -2, 2) if value is not None else "is None; 0 = off"
        text = f"must be above 0 and at most {MAX_REPETITION_PENALTY:g}; 1 = off"
        yield (
            "repetition_penalty",
            wrong(self.repetition_penalty, is_number, lambda x: 0 < x <= MAX_REPETITION_PENALTY, text),
        )
        yield "length_penalty", wrong_number(self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        known = any(self.early_stopping is value or self.early_stopping == value for value in _EARLY_STOPPING)
        yield "early_stopping", "" if known else f'is {self.early_stopping!r}; must be True, False or "never"'

    def _logit_bias_problem(self) -> str:
        if not isinstance(self.logit_bias, Mapping | None):
            return f"is {self.logit_bias!r}; must map token ids to numbers"
        for token_id, bias in (self.logit_bias or {}).items():
            if not is_whole(token_id) or not 0 <= token_id <= MAX_UINT32:
                return f"has {token_id!r}, which is no token id"
            if not is_number(bias) or not abs(bias) <= MAX_LOGIT_BIAS:
                return f"has {bias!r} for {token_id}; must be in {-MAX_LOGIT_BIAS:g}..{MAX_LOGIT_BIAS:g}"
        return ""

    def _end_problems(self) -> Iterator[tuple[str, str]]:
        yield "max_tokens", wrong(self.max_tokens, is_whole, lambda x: 1 <= x <= MAX_UINT32, "must be at least 1")
        yield "min_tokens", self._min_tokens_problem()
        yield "stop", wrong_texts(self.stop, MAX_STOP_STRINGS, alone=True)
        yield "stop_token_ids", wrong_ids(self.stop_token_ids)
        yield "ignore_eos", _flag_problem(self.ignore_eos)

    def _min_tokens_problem(self) -> str:
        if not is_whole(self.min_tokens) or not 0 <= self.min_tokens <= MAX_UINT32:
            return f"is {self.min_tokens!r}; must be a whole number that is not negative"
        if is_whole(self.max_tokens) and self.min_tokens > (self.max_tokens or 0):
            return f"is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Beam search with vLLM's names: returns the `beam_width` best hypotheses, best first.

    `length_penalty`, `early_stopping` and `logprobs`: see SamplingParams. `max_tokens`: None = up to the
    model's context.
    """

    beam_width: int
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] | None = ()
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    logprobs: bool | int | None = None

    def sampling_params(self) -> SamplingParams:
        """Convert to SamplingParams. Raises InvalidArgument naming the invalid field."""
        if not is_whole(self.beam_width) or not 1 <= self.beam_width <= MAX_CHOICES:
            raise InvalidArgument.field("beam_width", f"is {self.beam_width!r}; must be in 1..{MAX_CHOICES}")
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=True,
            temperature=0.0,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            logprobs=self.logprobs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How a prompt becomes a vector: the "mean" of its tokens' hidden states, or the "last" one.

    `normalize` scales the vector to length 1.
    """

    pooling: str = "mean"
    normalize: bool = True

    def __post_init__(self) -> None:
        if self.pooling not in ("mean", "last"):
            raise InvalidArgument.field("pooling", f'is {self.pooling!r}; must be "mean" or "last"')
        if text := _flag_problem(self.normalize):
            raise InvalidArgument.field("normalize", text)


AnyParams = SamplingParams | PoolingParams
"""Parameters of a request for tokens or for a vector."""


def _flag_problem(value: Any) -> str:
    return "" if isinstance(value, bool) else f"is {value!r}; must be True or False"


def _count_problem(value: Any) -> str:
    return wrong(value, is_whole, lambda x: 0 <= x <= MAX_LOGPROBS, f"must be in 0..{MAX_LOGPROBS}")
