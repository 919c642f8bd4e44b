"""Whole engines on one checkpoint: the three services over gRPC, and `LLM` in one process, with the same requests.

`nano` is nano-vllm's workload: 256 requests at once, prompts and outputs of 100 to 1,024 tokens. `even` has requests of one
length, which transformers' continuous batching takes too.
"""

import asyncio
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.gpu.clock import Bench
from benchmarks.gpu.models import Shape
from quire import LLM, SamplingParams
from quire.client.async_client import AsyncClient
from quire.local_stack.stack import LocalStack
from quire.operators.admin import AdminClient, step_json

_PARTS = ("cache", "prepare", "model", "sample")
_MODEL_LEN = 2176


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive at once: prompts, and how many tokens each is to get."""

    name: str
    prompts: Sequence[Sequence[int]]
    outputs: Sequence[int]

    @property
    def num_tokens(self) -> int:
        """Output tokens in total."""
        return sum(self.outputs)

    def floor_s(self, bench: Bench, shape: Shape) -> float:
        """Least time if all are resident: prompts at the rate of products, then steps that read weights and caches."""
        prompts = [len(prompt) for prompt in self.prompts]
        operations = sum(2 * shape.num_parameters * n + shape.attention_operations(n) for n in prompts)
        seconds = bench.floor_s(0, operations)
        for step in range(1, max(self.outputs)):
            live = [n + step for n, wanted in zip(prompts, self.outputs, strict=True) if wanted > step]
            seconds += bench.floor_s(shape.weight_bytes, 2 * shape.num_parameters * len(live))
            seconds += bench.floor_s(sum(live) * shape.kv_bytes(), 0)
        return seconds


def loads(shape: Shape, *, tiny: bool) -> dict[str, Load]:
    """`nano` and `even`."""
    rng, (low, high, count) = random.Random(0), (4, 12, 4) if tiny else (100, 1024, 256)
    prompts = [_ids(rng, rng.randint(low, high), shape) for _ in range(count)]
    even = 4 if tiny else 64
    return {
        "nano": Load("nano", prompts, [rng.randint(low, high) for _ in prompts]),
        "even": Load("even", [_ids(rng, 8 if tiny else 512, shape) for _ in range(even)], [8 if tiny else 128] * even),
    }


def _ids(rng: random.Random, count: int, shape: Shape) -> list[int]:
    return [rng.randrange(2, shape.config.vocab_size) for _ in range(count)]


def _settings(*, tiny: bool) -> dict[str, Any]:
    """Of the worker, and as options."""
    return {"device": "cuda", "max_model_len": 64 if tiny else _MODEL_LEN, "swap_space": "1MiB" if tiny else "1GiB"}


def _limits(*, tiny: bool) -> dict[str, Any]:
    return (
        {"max_num_seqs": 4, "max_num_batched_tokens": 64}
        if tiny
        else {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
    )


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


# --- in one process --------------------------------------------------------------------------------------------------


def offline(bench: Bench, shape: Shape, folder: Path, names: Sequence[str]) -> None:
    """E3, E4: seconds of each load in one process, all requests known from the start."""
    llm = LLM(model=folder, **_settings(tiny=bench.tiny), **_limits(tiny=bench.tiny))
    llm.generate([[5, 6, 7]], _params(4))
    for load in (loads(shape, tiny=bench.tiny)[name] for name in names):
        bench.measure(
            "in one process", f"{shape.name} {load.name}", lambda load=load: _generated(llm, load),
            work=load.floor_s(bench, shape), ceiling="floor",
        )  # fmt: skip
    llm.close()


def _generated(llm: LLM, load: Load) -> float:
    begin = time.perf_counter()
    outputs = llm.generate(list(load.prompts), [_params(count) for count in load.outputs])
    seconds = time.perf_counter() - begin
    _check_counts([output.outputs[0].token_ids for output in outputs], load)
    return seconds


def _check_counts(found: Sequence[Sequence[int]], load: Load) -> None:
    if [len(token_ids) for token_ids in found] != list(load.outputs):
        raise RuntimeError(f"{sum(map(len, found))} tokens of {load.num_tokens}")


# --- three services --------------------------------------------------------------------------------------------------


def stack(bench: Bench, shape: Shape, folder: Path, environ: Mapping[str, str] = os.environ) -> None:
    """E7, E8, E9: gateway, scheduler and worker serve requests; the same prompt twice gives the same tokens."""
    given = {name.replace("_", "-"): str(value) for name, value in _settings(tiny=bench.tiny).items()}
    begin = time.perf_counter()
    with LocalStack(
        model=folder, worker_args=[part for name, value in given.items() for part in (f"--{name}", value)],
        environ=dict(environ), start_timeout_s=240, **_limits(tiny=bench.tiny),
    ) as running:  # fmt: skip
        first = asyncio.run(_asked(running.grpc_address, Load("first", [[5, 6, 7]] * 2, [4, 4])))
        if first[0] != first[1]:
            raise RuntimeError(f"the same prompt gave {first[0]} and {first[1]}")
        bench.record("start to the first tokens", shape.name, time.perf_counter() - begin, work=0.0, ceiling="floor")
        for load in loads(shape, tiny=bench.tiny).values():
            bench.measure(
                "over gRPC", f"{shape.name} {load.name}", lambda load=load: _served(running, load),
                work=load.floor_s(bench, shape), ceiling="floor",
            )  # fmt: skip
        _between_steps(bench, shape, running)


def _served(running: LocalStack, load: Load) -> float:
    begin = time.perf_counter()
    found = asyncio.run(_asked(running.grpc_address, load))
    seconds = time.perf_counter() - begin
    _check_counts(found, load)
    return seconds


async def _asked(address: str, load: Load) -> list[list[int]]:
    async with AsyncClient(address) as client:
        calls = [
            client.generate(prompt, _params(count)) for prompt, count in zip(load.prompts, load.outputs, strict=True)
        ]
        return [list(output.outputs[0].token_ids) for output in await asyncio.gather(*calls)]


def _between_steps(bench: Bench, shape: Shape, running: LocalStack) -> None:
    """From the step log: steps in which many requests decode and none has its prompt computed."""
    with AdminClient(running.admin_address) as admin:
        steps = [step_json(step, tables=False) for step in admin.steps()]
    most = max((len(step["sampled"]) for step in steps), default=0)
    full = [step for step in steps if 2 * len(step["sampled"]) >= most]
    times = [step["times"] for step in full if not any(group["prefill"] for group in step["scheduled"])]
    pairs = [(one, other) for one, other in pairwise(times)]
    if not pairs:
        bench.skipped.append("steps of the stack: no two in a row decode")
        return
    busy = [sum(one[f"{part}_ns"] for part in _PARTS) for one, _ in pairs]
    periods = [other["started_ns"] - one["started_ns"] for one, other in pairs]
    gap_ns = statistics.median(max(0, period - used) for period, used in zip(periods, busy, strict=True))
    host_ns = statistics.median(one["schedule_ns"] + one["prepare_ns"] for one, _ in pairs)
    label, step_s = f"{shape.name} b{most}", statistics.median(periods) / 1e9
    bench.record("step of the stack", label, step_s, work=0.0, ceiling="floor")
    bench.record("worker idle between steps", label, max(gap_ns / 1e9, 1e-9), work=step_s, ceiling="floor")
    bench.record("schedule and prepare a step", label, host_ns / 1e9, work=step_s, ceiling="floor")
