"""The workloads: requests and arrival times, from one seed.

Greedy, exactly as many tokens as requested (`ignore_eos`).

Lengths and arrivals depend on the seed only, so that rounds are alike; token ids also on the round, so that
caches of earlier rounds do not help. Every engine gets the same ids in a round.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.compare.shapes import NUM_SPECIAL
from quire_tools.bench.workloads import Length, PlannedRequest


@dataclass(frozen=True, slots=True)
class Lengths:
    """One workload.

    `shared`: tokens that all prompts begin with, before `prompt`. `rate`: arrivals per second; 0 = at once.
    """

    num_requests: int
    prompt: Length
    output: Length
    shared: int = 0
    rate: float = 0.0


def fixed(num_tokens: int) -> Length:
    """A constant length."""
    return Length(num_tokens, 0.0, num_tokens, num_tokens)


DEFAULTS = {
    "W1": Lengths(64, fixed(64), fixed(128)),
    "W2": Lengths(64, Length(128, 0.7, 32, 512), Length(64, 0.7, 16, 256)),
    "W3": Lengths(64, fixed(32), fixed(32), shared=512),
    "W4": Lengths(1, fixed(128), fixed(256)),
    "W5": Lengths(64, Length(128, 0.7, 32, 512), Length(64, 0.7, 16, 256), rate=1.0),
    "P": Lengths(16, fixed(512), fixed(1)),
}
"""W1 to W5 of the goals, and P: prompts only. The rate of W5 is given or measured (`at_rate`)."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one run, in order of arrival."""

    name: str
    requests: tuple[PlannedRequest, ...]

    @property
    def output_tokens(self) -> int:
        """Output tokens requested in total."""
        return sum(request.max_tokens for request in self.requests)

    @property
    def is_open(self) -> bool:
        """True if requests arrive over time instead of at once."""
        return any(request.at_s for request in self.requests)


def drawn(name: str, lengths: Lengths, *, seed: int, round_: int, vocab_size: int) -> Workload:
    """The workload of one round; equal arguments give equal requests."""
    sizes, ids = random.Random(f"{seed} {name} sizes"), random.Random(f"{seed} {name} ids {round_}")
    shared = _ids(ids, lengths.shared, vocab_size)
    # A separate generator: lengths stay the same at any rate.
    arrivals = _arrivals(random.Random(f"{seed} {name} arrivals"), lengths)
    requests = []
    for index in range(lengths.num_requests):
        num_prompt, num_output = lengths.prompt.draw(sizes), lengths.output.draw(sizes)
        prompt = shared + _ids(ids, num_prompt, vocab_size)
        requests.append(PlannedRequest(index, arrivals(index), "", prompt, num_output))
    return Workload(name, tuple(requests))


def _ids(rng: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(NUM_SPECIAL, vocab_size) for _ in range(count))


def _arrivals(rng: random.Random, lengths: Lengths) -> Callable[[int], float]:
    """Arrival time of each request: a Poisson process, or zero."""
    if not lengths.rate:
        return lambda index: 0.0
    times = [0.0]
    while len(times) < lengths.num_requests:
        times.append(times[-1] + rng.expovariate(lengths.rate))
    return times.__getitem__


def at_rate(lengths: Lengths, rate: float) -> Lengths:
    """The same lengths with `rate` arrivals per second."""
    return replace(lengths, rate=rate)


def warm_up(vocab_size: int, number: int) -> Workload:
    """Four short requests before the timed ones; a different `number` gives different ids."""
    return drawn("warm-up", Lengths(4, fixed(24), fixed(8)), seed=number, round_=number, vocab_size=vocab_size)


def sampled(workload: Workload, count: int) -> Sequence[PlannedRequest]:
    """`count` of its requests, spread over it, for the token check."""
    requests = workload.requests
    chosen = min(count, len(requests))
    return [requests[i * len(requests) // chosen] for i in range(chosen)]
