"""Four synthetic workloads as functions of a seed: chats, long prompts, bursts, agents.

Shared prefixes have equal token ids: a chat's next prompt contains the model's earlier output, and agents of
a kind begin with the same prompt.
"""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire_tools.simulation.arrivals import Arrival
from quire_tools.simulation.token_model import EOS, PseudoTokens
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import StopRules

VOCAB_SIZE = 30_000


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a workload. Times are seconds of virtual time; `deadline_after_s`: from its arrival.

    It ends naturally after `num_output_tokens`; the scheduler knows only `max_tokens`.
    """

    request_id: str
    at_s: float
    prompt: list[int]
    num_output_tokens: int
    max_tokens: int
    priority: int = 0
    tenant: str = ""
    deadline_after_s: float | None = None

    def arrival(self) -> Arrival:
        """A new request for the job, since a request can be used only once."""
        request = Request(
            self.request_id,
            self.prompt,
            StopRules(max_tokens=self.max_tokens, eos_token_ids=frozenset([EOS])),
            self.at_s,
            priority=self.priority,
            cache_salt=self.tenant,
            tenant=self.tenant,
        )
        deadline_s = None if self.deadline_after_s is None else self.at_s + self.deadline_after_s
        return Arrival(self.at_s, request, deadline_s=deadline_s)


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs in order of arrival; equal seeds give equal jobs."""

    name: str
    seed: int
    jobs: list[Job] = field(default_factory=list)

    def arrivals(self) -> list[Arrival]:
        """New requests for one run."""
        return [job.arrival() for job in self.jobs]

    def tokens(self) -> PseudoTokens:
        """The token model for the jobs: every output has its planned length."""
        return PseudoTokens(
            self.seed, {job.request_id: job.num_output_tokens for job in self.jobs}, vocab_size=VOCAB_SIZE
        )


def chat(seed: int, num_requests: int, rate: float) -> Workload:
    """Conversations of about five turns with Poisson starts; each prompt contains the whole conversation so far.

    `rate`: requests per second. Between turns a user reads and types for about 6 s; in one of ten
    conversations the user's messages are four times as long.
    """
    rng, model, jobs = random.Random(f"chat {seed}"), PseudoTokens(seed, vocab_size=VOCAB_SIZE), list[Job]()
    num_sessions = math.ceil(num_requests / 5)
    for session, start in enumerate(_poisson(rng, num_sessions, rate / 5)):
        history, at_s = _words(seed, "system", session % 3, 48), start
        talkative = 4 if rng.random() < 0.1 else 1
        for turn in range(_between(rng, 1, 9)):
            name = f"chat-{session}-{turn}"
            history = history + _words(seed, name, 0, _log_normal(rng, 40, 0.8, 4, 600) * talkative)
            length = _log_normal(rng, 150, 0.7, 8, 700)
            jobs.append(Job(name, at_s, history, length, 1_024))
            history = history + [model.token(name, 0, offset) for offset in range(length - 1)]
            at_s += rng.expovariate(1 / 6.0) + 0.02 * length
    return _workload("chat", seed, jobs, num_requests)


def long_prompts(seed: int, num_requests: int, rate: float) -> Workload:
    """Documents to summarize among short questions: a third of the prompts have thousands of tokens."""
    rng, jobs = random.Random(f"long {seed}"), list[Job]()
    for number, at_s in enumerate(_poisson(rng, num_requests, rate)):
        is_long = rng.random() < 1 / 3
        num_prompt = _log_normal(rng, 3_000, 0.5, 1_000, 7_000) if is_long else _log_normal(rng, 120, 0.7, 16, 600)
        num_output = _log_normal(rng, 120, 0.5, 16, 400)
        jobs.append(Job(f"doc-{number}", at_s, _words(seed, "doc", number, num_prompt), num_output, 512))
    return _workload("long prompts", seed, jobs, num_requests)


def bursts(seed: int, num_requests: int, rate: float) -> Workload:
    """A low rate, interrupted by bursts of 20 to 60 requests within a second; about two thirds of all requests are in bursts."""
    rng, jobs, at_s = random.Random(f"bursts {seed}"), list[Job](), 0.0
    while len(jobs) < num_requests:
        calm, crowd = _between(rng, 5, 25), _between(rng, 20, 60)
        spans = [rng.expovariate(1.0) for _ in range(calm)]
        length_s = (calm + crowd) / rate
        times = [at_s + length_s * s / sum(spans) for s in _cumulated(spans)]
        burst_at = at_s + rng.random() * length_s
        times += [burst_at + rng.uniform(0.0, 1.0) for _ in range(crowd)]
        for time_s in sorted(times):
            number = len(jobs)
            num_prompt, num_output = _log_normal(rng, 250, 0.9, 16, 2_000), _log_normal(rng, 180, 0.7, 8, 800)
            jobs.append(Job(f"burst-{number}", time_s, _words(seed, "burst", number, num_prompt), num_output, 1_024))
        at_s += length_s
    return _workload("bursts", seed, jobs, num_requests)


def agents(seed: int, num_requests: int, rate: float) -> Workload:
    """Agents of four kinds: a long prompt shared by all of a kind, then a context that grows with every tool call.

    Calls of one agent follow each other quickly and have short outputs; tool results may be long.
    """
    rng, model, jobs = random.Random(f"agents {seed}"), PseudoTokens(seed, vocab_size=VOCAB_SIZE), list[Job]()
    for agent, start in enumerate(_poisson(rng, math.ceil(num_requests / 6), rate / 6)):
        context, at_s = _words(seed, "agent", agent % 4, 1_200), start
        for call in range(_between(rng, 3, 9)):
            name = f"agent-{agent}-{call}"
            context = context + _words(seed, name, 0, _log_normal(rng, 150, 0.9, 16, 1_500))
            length = _log_normal(rng, 60, 0.6, 8, 250)
            jobs.append(Job(name, at_s, context, length, 512))
            context = context + [model.token(name, 0, offset) for offset in range(length - 1)]
            at_s += 1.0 + rng.expovariate(1 / 2.0) + 0.02 * length
    return _workload("agents", seed, jobs, num_requests)


MakeWorkload = Callable[[int, int, float], Workload]
WORKLOADS: dict[str, MakeWorkload] = {"chat": chat, "long-prompts": long_prompts, "bursts": bursts, "agents": agents}


def _workload(name: str, seed: int, jobs: list[Job], num_requests: int) -> Workload:
    """The first `num_requests` jobs in order of arrival."""
    return Workload(name, seed, sorted(jobs, key=lambda job: (job.at_s, job.request_id))[:num_requests])


def _poisson(rng: random.Random, count: int, rate: float) -> list[float]:
    """Arrival times of a Poisson process."""
    return _cumulated([rng.expovariate(rate) for _ in range(count)])


def _cumulated(spans: Iterable[float]) -> list[float]:
    times, at_s = [], 0.0
    for span in spans:
        at_s += span
        times.append(at_s)
    return times


def _between(rng: random.Random, low: int, high: int) -> int:
    return rng.randint(low, high)


def _log_normal(rng: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    """A length with that median, clipped."""
    return min(high, max(low, round(rng.lognormvariate(math.log(median), sigma))))


def _words(seed: int, kind: str, number: int, count: int) -> list[int]:
    """Pseudo-random token ids that depend on `seed`, `kind` and `number`."""
    rng = random.Random(f"{seed} {kind} {number}")
    return [1 + rng.randrange(VOCAB_SIZE - 1) for _ in range(count)]
