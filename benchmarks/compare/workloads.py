"""The workloads: what is asked and when, from one seed. Greedy, exactly as many tokens as asked (`ignore_eos`).

Lengths and arrivals depend on the seed only, so that rounds are alike; token ids on the round too, so that no cache knows them from
the round before. Every engine gets the same ids in a round.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.compare.shapes import NUM_SPECIAL
from quire.bench.workloads import Length, Planned


@dataclass(frozen=True, slots=True)
class Lengths:
    """One workload. `shared`: tokens that all prompts begin with, before `prompt`. `rate`: arrivals per second; 0 = at once."""

    num_requests: int
    prompt: Length
    output: Length
    shared: int = 0
    rate: float = 0.0


def fixed(num_tokens: int) -> Length:
    """A length that is always the same."""
    return Length(num_tokens, 0.0, num_tokens, num_tokens)


DEFAULTS = {
    "W1": Lengths(64, fixed(64), fixed(128)),
    "W2": Lengths(64, Length(128, 0.7, 32, 512), Length(64, 0.7, 16, 256)),
    "W3": Lengths(64, fixed(32), fixed(32), shared=512),
    "W4": Lengths(1, fixed(128), fixed(256)),
    "W5": Lengths(64, Length(128, 0.7, 32, 512), Length(64, 0.7, 16, 256), rate=1.0),
    "P": Lengths(16, fixed(512), fixed(1)),
}
"""W1 to W5 of the goals, and P: nothing but prompts. The rate of W5 is what the caller says or finds (`at_rate`)."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one run, in order of arrival."""

    name: str
    requests: tuple[Planned, ...]

    @property
    def output_tokens(self) -> int:
        """Asked for in all."""
        return sum(request.max_tokens for request in self.requests)

    @property
    def is_open(self) -> bool:
        """Whether requests come one after the other at times of their own."""
        return any(request.at_s for request in self.requests)


def drawn(name: str, lengths: Lengths, *, seed: int, round_: int, vocab_size: int) -> Workload:
    """The workload of one round; equal arguments give equal requests."""
    sizes, ids = random.Random(f"{seed} {name} sizes"), random.Random(f"{seed} {name} ids {round_}")
    shared = _ids(ids, lengths.shared, vocab_size)
    # From numbers of their own: lengths stay the same at any rate.
    arrivals = _arrivals(random.Random(f"{seed} {name} arrivals"), lengths)
    requests = []
    for index in range(lengths.num_requests):
        num_prompt, num_output = lengths.prompt.draw(sizes), lengths.output.draw(sizes)
        prompt = shared + _ids(ids, num_prompt, vocab_size)
        requests.append(Planned(index, arrivals(index), "", prompt, num_output))
    return Workload(name, tuple(requests))


def _ids(rng: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(NUM_SPECIAL, vocab_size) for _ in range(count))


def _arrivals(rng: random.Random, lengths: Lengths) -> Callable[[int], float]:
    """Time of each request: of a Poisson process, or zero."""
    if not lengths.rate:
        return lambda index: 0.0
    times = [0.0]
    while len(times) < lengths.num_requests:
        times.append(times[-1] + rng.expovariate(lengths.rate))
    return times.__getitem__


def at_rate(lengths: Lengths, rate: float) -> Lengths:
    """The same with so many arrivals per second."""
    return replace(lengths, rate=rate)


def warm_up(vocab_size: int, number: int) -> Workload:
    """Four short requests before anything is timed; another `number` has other ids."""
    return drawn("warm-up", Lengths(4, fixed(24), fixed(8)), seed=number, round_=number, vocab_size=vocab_size)


def sampled(workload: Workload, count: int) -> Sequence[Planned]:
    """`count` of its requests, spread over it, whose tokens are checked."""
    requests = workload.requests
    chosen = min(count, len(requests))
    return [requests[i * len(requests) // chosen] for i in range(chosen)]
