"""How the tokens of one request are chosen and when it ends, under vLLM's names and with its defaults.

Lives here: the values and their checks. Not here: the wire form (quire.messages) and the drawing (the worker's sampler).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from svc_common.errors import FieldViolation, InvalidArgument

MAX_SEED = 2**64 - 1
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
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
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
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities were asked for (vLLM's 0 asks, None does not)."""
        return self.logprobs is not None and self.logprobs is not False

    def _violations(self) -> Iterator[tuple[str, str]]:
        """(field, what is wrong with it), or nothing wrong: an empty text."""
        yield "n", "" if self.n == 1 else f"is {self.n}; one sequence per prompt so far: repeat the prompt instead"
        yield "temperature", _outside(self.temperature, lambda x: 0 <= x <= MAX_TEMPERATURE, "must be in 0..10")
        yield "top_p", _outside(self.top_p, lambda x: 0 < x <= 1, "must be above 0 and at most 1")
        yield "top_k", _outside(self.top_k, lambda x: x >= -1, "must be positive, or 0 (or -1) for all")
        yield "seed", _outside(self.seed, lambda x: 0 <= x <= MAX_SEED, "must be an unsigned number of 64 bits")
        yield "max_tokens", _outside(self.max_tokens, lambda x: x >= 1, "must be at least 1")
        yield "min_tokens", self._min_tokens_problem()
        yield "stop", self._stop_problem()
        yield "stop_token_ids", "has a negative id" if any(i < 0 for i in self.stop_token_ids) else ""
        yield "logprobs", _outside(self.logprobs, lambda x: x in {0, 1}, "only the chosen token's (1 or True) so far")

    def _min_tokens_problem(self) -> str:
        if self.min_tokens < 0:
            return f"is {self.min_tokens}; must not be negative"
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            return f"is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}"
        return ""

    def _stop_problem(self) -> str:
        strings = self.stop_strings
        if len(strings) > MAX_STOP_STRINGS:
            return f"has {len(strings)} strings; at most {MAX_STOP_STRINGS}"
        return "" if all(strings) else "has an empty string"


def _outside(value: float | None, allowed: Callable[[float], bool], text: str) -> str:
    return "" if value is None or allowed(value) else f"is {value}; {text}"
