"""Measures this machine's rates and prints them as JSON: python -m benchmarks.compare.limits_reading MIB SIZE THREADS

Memory: reductions over more memory than caches hold, the best of several kernels and tries. Products: torch
and numpy, the better.
"""

import json
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.compare.limits import Rates

_TRIES = 5
_LEAST_S, _MOST_S = 0.05, 5.0


def _fastest_s(call: Callable[[], object]) -> float:
    """Seconds of the fastest of a few calls, each repeated until the clock resolution suffices.

    A call that takes so long that its first time hardly matters counts at once.
    """
    began = time.perf_counter()
    call()
    first = time.perf_counter() - began
    if first > _MOST_S:
        return first
    repeats = max(1, round(_LEAST_S / max(1e-9, first)))
    times = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        times.append((time.perf_counter() - began) / repeats)
    return min(times)


def _read_rate(mib: int, threads: int) -> float:
    torch.set_num_threads(threads)
    numbers = torch.ones(mib << 18, dtype=torch.float32)
    rows = numbers.view(-1, 1024)
    column = torch.ones(1024, dtype=torch.float32)
    kernels: list[Callable[[], object]] = [
        numbers.sum,
        lambda: torch.dot(numbers, numbers),
        lambda: torch.mv(rows, column),
    ]
    return numbers.nbytes / min(map(_fastest_s, kernels))


def _gemm_rate(size: int, threads: int, dtype: torch.dtype) -> float:
    torch.set_num_threads(threads)
    a = torch.randn(size, size).to(dtype)
    b = torch.randn(size, size).to(dtype)
    times = [_fastest_s(lambda: torch.mm(a, b)), _fastest_s(lambda: torch.nn.functional.linear(a, b))]
    if dtype is torch.float32:
        x, y = np.asarray(a), np.asarray(b)
        times.append(_fastest_s(lambda: x @ y))
    return 2 * size**3 / min(times)


def main(mib: int, size: int, threads: int) -> Rates:
    """Measure all rates; see limits.Rates."""
    return Rates(
        read_one=_read_rate(mib, 1),
        read_all=_read_rate(mib, threads),
        gemm_bf16=_gemm_rate(size, threads, torch.bfloat16),
        gemm_fp32=_gemm_rate(size, threads, torch.float32),
    )


if __name__ == "__main__":
    rates = main(*map(int, sys.argv[1:]))
    print(json.dumps({name: getattr(rates, name) for name in Rates.__dataclass_fields__}))
