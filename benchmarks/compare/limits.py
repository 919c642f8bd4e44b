"""Limits of the machine: its rates, and the minimum time of each workload at these rates.

The time of a step is at least

    max(weights / memory rate, matrix FLOPs / GEMM rate) + keys and values read / memory rate

with bfloat16 weights read once per step, 2 FLOPs for each weight and token (the head's only where a token is
sampled), and each sequence's keys and values read once per token. An ideal schedule is assumed: one step for
all prompts (a prefix shared by all requests is computed once), then steps in which every running sequence
gets a token. Scheduler, wire, sampling, norms and activations cost nothing. limits_reading measures the
rates.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.compare.shapes import ModelShape
from benchmarks.compare.workloads import Workload
from quire.local_stack.processes import child_environment

_TIMEOUT_S = 1_000.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of this machine: memory reads in bytes/s on one thread and on all; products of large matrices in FLOP/s."""

    read_one: float
    read_all: float
    gemm_bf16: float
    gemm_fp32: float

    @property
    def gemm(self) -> float:
        """The better of both: a processor without bfloat16 instructions multiplies bfloat16 values faster as float32."""
        return max(self.gemm_bf16, self.gemm_fp32)


def read_rates(mib: int, size: int, threads: int) -> Rates:
    """Measure the rates now, in a separate process. `mib`: memory to read; `size`: rows of matrices.

    Raises RuntimeError if it failed.
    """
    command = [sys.executable, "-m", "benchmarks.compare.limits_reading", str(mib), str(size), str(threads)]
    environ = child_environment(os.environ)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"reading the limits failed: {done.stderr.strip()[-500:]}")
    return Rates(**json.loads(done.stdout))


def best(readings: Sequence[Rates]) -> Rates:
    """The best of several readings per rate: time taken by other processes is no limit of the machine."""
    many = [asdict(reading) for reading in readings]
    return Rates(**{name: max(reading[name] for reading in many) for name in many[0]})


def least_s(workload: Workload, shape: ModelShape, rates: Rates) -> float:
    """Minimum seconds of the workload, with all arrivals at once."""
    decoding = _decode_steps_s(workload, shape, rates)
    return _prompt_s(workload, shape, rates) + decoding


def limit_tokens_per_s(workload: Workload, shape: ModelShape, rates: Rates) -> float | None:
    """Maximum output tokens per second; None if arrivals determine the rate."""
    return None if workload.is_open else workload.output_tokens / least_s(workload, shape, rates)


def _prompt_s(workload: Workload, shape: ModelShape, rates: Rates) -> float:
    shared = shared_prefix(workload)
    flops = shape.head_flops * len(workload.requests) + _prefill_flops(shape, 0, shared)
    flops += sum(_prefill_flops(shape, shared, len(request.token_ids)) for request in workload.requests)
    return max(shape.step_weight_bytes / rates.read_all, flops / rates.gemm)


def _prefill_flops(shape: ModelShape, begin: int, end: int) -> float:
    """FLOPs of the tokens at positions `begin` to `end`, without logits."""
    return (end - begin) * (shape.body_flops + shape.attention_flops(1) * (begin + end) / 2)


def _decode_steps_s(workload: Workload, shape: ModelShape, rates: Rates) -> float:
    """Seconds of all decode steps; the first token comes from the prompt's step."""
    total = 0.0
    for step in range(1, max(request.max_tokens for request in workload.requests)):
        contexts = [len(request.token_ids) + step for request in workload.requests if request.max_tokens > step]
        products = len(contexts) * (shape.body_flops + shape.head_flops) / rates.gemm
        weights = shape.step_weight_bytes / rates.read_all
        total += max(weights, products) + sum(contexts) * shape.kv_token_bytes / rates.read_all
    return total


def shared_prefix(workload: Workload) -> int:
    """Number of tokens with which all prompts begin; 0 if there is only one prompt."""
    if len(workload.requests) < 2:
        return 0
    columns = zip(*(request.token_ids for request in workload.requests), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
