"""Workloads: prompts, lengths and arrival times, all from one seed. Not here: sending and measuring."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Protocol

_TEXT = (
    "def return import class self value list index count result error while for in if else not None True False open "
    "read write line text name path file data key item size start end time the of to and a is that with as by on from"
)
_WORDS = _TEXT.split()


class WorkloadKind(StrEnum):
    """The four shapes of load."""

    BATCH = "batch"
    POISSON = "poisson"
    SHARED_PREFIX = "shared-prefix"
    SINGLE = "single"


class Tokenizer(Protocol):
    """The part of `tokenizers.Tokenizer` needed to make prompts of exact length."""

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, without special ones."""

    def decode(self, ids: list[int]) -> str:
        """Text of the ids."""


@dataclass(slots=True, frozen=True)
class Length:
    """A length in tokens: fixed, or log-normal (`median`, `sigma` of the logarithm) clipped to [low, high]."""

    median: int
    sigma: float = 0.0
    low: int = 1
    high: int = 1 << 20

    @classmethod
    def parse(cls, text: str) -> "Length":
        """Parse `128`, `lognormal:128:0.6` or `lognormal:128:0.6:16:1024`. Raises ValueError for anything else."""
        parts = text.split(":")
        try:
            if len(parts) == 1:
                return cls(int(text), 0.0, int(text), int(text))
            name, median, sigma, *bounds = parts
            if name == "lognormal" and len(bounds) in (0, 2):
                return cls(int(median), float(sigma), *map(int, bounds))
        except ValueError:
            pass
        raise ValueError(f"length {text!r} is neither N nor lognormal:MEDIAN:SIGMA[:MIN:MAX]")

    def draw(self, rng: random.Random) -> int:
        """Draw one length, at least 1."""
        drawn = self.median if self.sigma == 0 else round(self.median * rng.lognormvariate(0.0, self.sigma))
        return max(1, self.low, min(drawn, self.high))


@dataclass(slots=True, frozen=True)
class LoadShape:
    """One run of load. `rate`: arrivals per second (Poisson); None = all at once."""

    kind: WorkloadKind
    num_requests: int
    prompt: Length
    output: Length
    seed: int = 0
    rate: float | None = None
    prefix_len: int = 256
    num_prefixes: int = 4

    @property
    def one_at_a_time(self) -> bool:
        """True if each request starts when the previous one has ended."""
        return self.kind is WorkloadKind.SINGLE


@dataclass(slots=True, frozen=True)
class PlannedRequest:
    """One request, `at_s` seconds after the start. `token_ids` empty = send the text."""

    index: int
    at_s: float
    text: str
    token_ids: tuple[int, ...]
    max_tokens: int


def plan(shape: LoadShape, tokenizer: Tokenizer | None = None) -> list[PlannedRequest]:
    """The requests of a run in order of arrival; equal shapes give equal plans.

    With a tokenizer, token ids have exactly the drawn length, and texts too, up to one token where two
    pieces meet; without one, lengths count words.
    """
    rng = shape_rng(shape)
    cut = _words if tokenizer is None else _exactly(tokenizer)
    times = arrivals(shape, rng)
    prefixes = [cut(rng, shape.prefix_len) for _ in range(shape.num_prefixes)] if _shares(shape) else [("", ())]
    planned = []
    for index, at_s in enumerate(times):
        prefix_text, prefix_ids = prefixes[index % len(prefixes)]
        text, ids = cut(rng, shape.prompt.draw(rng))
        planned.append(PlannedRequest(index, at_s, prefix_text + text, prefix_ids + ids, shape.output.draw(rng)))
    return planned


def _shares(shape: LoadShape) -> bool:
    return shape.kind is WorkloadKind.SHARED_PREFIX


def shape_rng(shape: LoadShape) -> random.Random:
    """The random generator of a run."""
    return random.Random(f"{shape.seed} {shape.kind.value}")


def arrivals(shape: LoadShape, rng: random.Random) -> Iterator[float]:
    """Arrival times in seconds: a Poisson process of the shape's rate, or all at once."""
    if shape.rate is None:
        return iter([0.0] * shape.num_requests)
    gaps = [0.0] + [rng.expovariate(shape.rate) for _ in range(shape.num_requests - 1)]
    return accumulate(gaps)


def _words(rng: random.Random, count: int) -> tuple[str, tuple[int, ...]]:
    return "".join(f"{rng.choice(_WORDS)} " for _ in range(count)), ()


def _exactly(tokenizer: Tokenizer) -> Callable[[random.Random, int], tuple[str, tuple[int, ...]]]:
    def cut(rng: random.Random, count: int) -> tuple[str, tuple[int, ...]]:
        text = _words(rng, 2 * count + 8)[0]
        ids = tokenizer.encode(text)[:count]
        return tokenizer.decode(ids), tuple(ids)

    return cut
