"""Workloads and figures of the memory benchmark: constant lengths with the closed form, and lengths like the paper's.

The paper is "Efficient Memory Management for Large Language Model Serving with PagedAttention" (Kwon et al.
2023).
"""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from benchmarks.memory.runs import Job, Kind, Moment, Setting, serve_contiguous, serve_paged
from block_manager.contiguous import ContiguousMemory, shares
from block_manager.memory_report import PagedMemory

BLOCK_SIZE = 16
# The paper's OPT-13B on a device of 40 GB: 12 GB of KV cache hold about 16,000 tokens; the model takes 2,048
# per request.
NUM_BLOCKS, MAX_MODEL_LEN = 1_000, 2_048


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal lengths with a mean in tokens, taken at equal steps of probability, so that few represent many."""

    mean: float
    sigma: float = 0.83

    def spread(self, count: int) -> list[int]:
        """`count` lengths, shortest first, at least 1 and at most half of the model's limit."""
        logarithm = NormalDist(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        lengths = [round(math.exp(logarithm.inv_cdf((i + 0.5) / count))) for i in range(count)]
        return [max(1, min(length, MAX_MODEL_LEN // 2 - 1)) for length in lengths]


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths, and one arrival per `steps_between` steps on average (Poisson).

    `paper`: the range of savings that it reports.
    """

    name: str
    kind: Kind
    prompt: Lengths
    output: Lengths
    steps_between: int
    paper: tuple[float, float]

    def jobs(self, num_requests: int, seed: int) -> list[Job]:
        """Jobs in order of arrival; equal seeds give equal jobs."""
        rng, at, jobs = random.Random(f"{self.name} {seed}"), 0.0, []
        prompts, outputs = (lengths.spread(num_requests) for lengths in (self.prompt, self.output))
        rng.shuffle(prompts)
        rng.shuffle(outputs)
        for prompt, output in zip(prompts, outputs, strict=True):
            jobs.append(Job(prompt, output, int(at)))
            at += rng.expovariate(1.0 / self.steps_between)
        return jobs


# Mean lengths of the data sets; their standard deviations are about as large as the means.
_ALPACA = (Lengths(19.31), Lengths(58.45), 15)
_SHAREGPT = (Lengths(161.31), Lengths(337.99), 100)
_OF_SAMPLING, _OF_BEAMS = (0.06, 0.30), (0.44, 0.66)
WORKLOADS = (
    Workload("alpaca-like", Kind.SAMPLING, *_ALPACA, _OF_SAMPLING),
    Workload("sharegpt-like", Kind.SAMPLING, *_SHAREGPT, _OF_SAMPLING),
    Workload("sharegpt-like", Kind.BEAM, *_SHAREGPT, _OF_BEAMS),
)


def closed_form(prompt: int, outputs: int, block_size: int, n: int) -> float:
    """1 - sum over t = 1..O of (floor(P/b) + n (L_t - floor(P/b))) / sum of n L_t, with L_t = ceil((P + t) / b).

    The share of blocks that sharing saves; P, O, b: prompt, outputs, block_size.
    """
    shared = prompt // block_size
    lengths = [-(-(prompt + t) // block_size) for t in range(1, outputs + 1)]
    return 1 - sum(shared + n * (length - shared) for length in lengths) / sum(n * length for length in lengths)


def total_of_decodes(moments: Iterable[Moment]) -> PagedMemory:
    """Sum over the decode steps; steps that compute a prompt are left out."""
    memories = [moment.memory for moment in moments if moment.is_decode]
    total = memories[0]
    for memory in memories[1:]:
        total += memory
    return total


def constant(prompt: int, outputs: int, block_size: int, n: int) -> dict[str, Any]:
    """Figures of one request of constant lengths, served alone by the scheduler core, with the closed form."""
    num_blocks = n * -(-(prompt + outputs) // block_size)
    # A fiftieth more, for the watermark of v0.
    setting = Setting(Kind.SAMPLING, n, block_size, num_blocks + num_blocks // 50 + 1, prompt + outputs + 1)
    total = total_of_decodes(serve_paged([Job(prompt, outputs)], setting))
    return {
        "prompt": prompt,
        "outputs": outputs,
        "block_size": block_size,
        "n": n,
        "saved": total.saved,
        "closed_form": closed_form(prompt, outputs, block_size, n),
        "max_waste_tokens": total.max_waste_tokens,
    }


def setting_of(workload: Workload, n: int, seed: int) -> Setting:
    """The paper's memory; larger if `n` regions of a contiguous memory would not fit it."""
    return Setting(workload.kind, n, BLOCK_SIZE, max(NUM_BLOCKS, n * MAX_MODEL_LEN // BLOCK_SIZE), MAX_MODEL_LEN, seed)


def figures(workload: Workload, n: int, num_requests: int, seed: int) -> dict[str, Any]:
    """Figures of one workload with `n` samples or beams each, with paging and without."""
    jobs, setting = workload.jobs(num_requests, seed), setting_of(workload, n, seed)
    moments = list(serve_paged(jobs, setting))
    total = total_of_decodes(moments)
    rows = list(serve_contiguous(jobs, setting))
    return {
        "name": workload.name,
        "kind": workload.kind.value,
        "n": n,
        "saved": total.saved,
        "paper": list(workload.paper),
        "max_waste_tokens": total.max_waste_tokens,
        "waste": total.waste,
        "contiguous": mean_shares(memory for memory, _ in rows),
        "num_requests": num_requests,
        "steps": {"paged": len(moments), "contiguous": len(rows)},
    }


def mean_shares(memories: Iterable[ContiguousMemory]) -> dict[str, float]:
    """Shares of all slots used or lost, summed over the steps; they add up to 1."""
    used = reserved = internal = external = 0
    for memory in memories:
        used += memory.used
        reserved += memory.reserved
        internal += memory.internal
        external += memory.external
    return shares(used, reserved, internal, external)


def all_figures(counts: Iterable[int], num_requests: int, seed: int) -> Iterator[dict[str, Any]]:
    """Figures of every workload with every number of samples or beams above 1."""
    wanted = [n for n in counts if n > 1]
    return (figures(workload, n, num_requests, seed) for workload in WORKLOADS for n in wanted)
