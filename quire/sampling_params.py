"""How the tokens of one request are chosen and when it ends, under vLLM's names and with its defaults.

Lives here: the values and their checks. Not here: the wire form (quire.messages) and the drawing (the worker's sampler).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from svc_common.errors import FieldViolation, InvalidArgument

MAX_SEED = 2**64 - 1
MAX_UINT32 = 2**32 - 1
MAX_TEMPERATURE = 10.0
MAX_STOP_STRINGS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Raises InvalidArgument with a violation for every field that is wrong.

    temperature: 0 = greedy; up to 10. top_p: in (0, 1]. top_k: keep the k likeliest; 0 or -1 = all. None = the model's default.
    seed: equal requests with equal seeds give equal outputs, in process and over gRPC; None = drawn for each request.
    max_tokens: most tokens to generate; 16 as in vLLM, None = up to the model's context.
    min_tokens: no stop rule but the length applies below this many. stop: strings before which the output ends.
    logprobs: the log probability of each chosen token (True, or vLLM's 0 and 1); alternatives are not returned.
    """

    n: int = 1
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    logprobs: bool | int | None = None

    def __post_init__(self) -> None:
        wrong = [FieldViolation(field, text) for field, text in self._violations() if text]
        if wrong:
            raise InvalidArgument(
                "; ".join(f"{v.field}: {v.description}" for v in wrong), reason="INVALID_FIELD", violations=wrong
            )

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(() if self.stop is None else self.stop)

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities were asked for (vLLM's 0 asks, None does not)."""
        return self.logprobs is not None and self.logprobs is not False

    def _violations(self) -> Iterator[tuple[str, str]]:
        """(field, what is wrong with it), or nothing wrong: an empty text."""
        yield "n", "" if self.n == 1 else f"is {self.n!r}; one sequence per prompt so far: repeat the prompt instead"
        yield (
            "temperature",
            _wrong(self.temperature, is_number, lambda x: 0 <= x <= MAX_TEMPERATURE, "must be in 0..10"),
        )
        yield "top_p", _wrong(self.top_p, is_number, lambda x: 0 < x <= 1, "must be above 0 and at most 1")
        yield (
            "top_k",
            _wrong(self.top_k, is_whole, lambda x: -1 <= x <= MAX_UINT32, "must be positive, or 0 (or -1) for all"),
        )
        yield "seed", _wrong(self.seed, is_whole, lambda x: 0 <= x <= MAX_SEED, "must be an unsigned number of 64 bits")
        yield "max_tokens", _wrong(self.max_tokens, is_whole, lambda x: 1 <= x <= MAX_UINT32, "must be at least 1")
        yield "min_tokens", self._min_tokens_problem()
        yield "stop", self._stop_problem()
        yield "stop_token_ids", self._stop_token_ids_problem()
        yield (
            "ignore_eos",
            "" if isinstance(self.ignore_eos, bool) else f"is {self.ignore_eos!r}; must be True or False",
        )
        asked = self.logprobs if self.wants_logprobs else None
        yield "logprobs", _wrong(asked, _is_count, lambda x: x in {0, 1}, "only the chosen token's (1 or True) so far")

    def _min_tokens_problem(self) -> str:
        if not is_whole(self.min_tokens) or not 0 <= self.min_tokens <= MAX_UINT32:
            return f"is {self.min_tokens!r}; must be a whole number that is not negative"
        if is_whole(self.max_tokens) and self.min_tokens > (self.max_tokens or 0):
            return f"is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}"
        return ""

    def _stop_problem(self) -> str:
        if not isinstance(self.stop, str | None) and not is_listing(self.stop):
            return f"is {self.stop!r}; must be a text or a list of texts"
        strings = self.stop_strings
        if not all(isinstance(text, str) for text in strings):
            return "must have texts only"
        if len(strings) > MAX_STOP_STRINGS:
            return f"has {len(strings)} strings; at most {MAX_STOP_STRINGS}"
        return "" if all(strings) else "has an empty string"

    def _stop_token_ids_problem(self) -> str:
        if self.stop_token_ids is None:
            return ""
        if not is_listing(self.stop_token_ids):
            return f"is {self.stop_token_ids!r}; must be a list of token ids"
        bad = [i for i in self.stop_token_ids if not is_whole(i) or i < 0]
        return f"has {bad[0]!r}, which is no token id" if bad else ""


# --- kinds of values -----------------------------------------------------------------------------------------------------


def is_number(value: Any) -> bool:
    """A number; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """A whole number, numpy's included; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_listing(value: Any) -> bool:
    """Several values: a list, a tuple, an array; never a text, bytes or a mapping."""
    return isinstance(value, Collection) and not isinstance(value, str | bytes | bytearray | Mapping)


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral)


def _wrong(value: Any, kind: Callable[[Any], bool], allowed: Callable[[Any], bool], text: str) -> str:
    return "" if value is None or (kind(value) and allowed(value)) else f"is {value!r}; {text}"
