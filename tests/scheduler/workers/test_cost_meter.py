"""The scheduler learns what steps cost on its worker, and tells the core."""

import random

import pytest

from scheduler_svc.core.parts.costs import Costs
from scheduler_svc.workers.cost_meter import CostMeter
from tests.support.services.harness import run_async, stack


def observed(meter: CostMeter, num_tokens: int, num_moved: int = 0, noise: float = 1.0) -> Costs | None:
    """A step of 5 ms, 0.1 ms a token and 0.02 ms a moved block."""
    return meter.observe(num_tokens, num_moved, int((5e6 + 1e5 * num_tokens + 2e4 * num_moved) * noise))


def test_costs_are_found_in_durations() -> None:
    """A line through steps of many sizes; blocks by what their steps took beyond it, told at the first that moved."""
    rng, meter, told = random.Random(1), CostMeter(), []
    for _ in range(100):
        told.append(observed(meter, rng.randint(1, 200), noise=rng.uniform(0.97, 1.03)))
    [first] = [costs for costs in told if costs is not None]
    assert first.compute_token_s == pytest.approx(1e-4, rel=0.1)
    assert first.step_s == pytest.approx(5e-3, rel=0.2)
    assert first.swap_block_s == 0.0
    moved = observed(meter, 50, num_moved=500)
    assert moved is not None
    assert moved.swap_block_s == pytest.approx(2e-5, rel=0.2)


def test_only_news_are_told() -> None:
    """The core's costs are recorded inputs: the same again is none; steps of one size say nothing of tokens."""
    meter = CostMeter()
    told = [observed(meter, 8) for _ in range(320)]
    [costs] = [costs for costs in told if costs is not None]
    assert (costs.compute_token_s, costs.step_s) == (0.0, pytest.approx(5.8e-3))
    assert meter.observe(0, 3, 5) is None and meter.observe(5, 0, 0) is None


@run_async
async def test_the_service_measures_and_refuses_what_cannot_be_in_time() -> None:
    """Prompts of many lengths teach what a token costs; then a long one with no time for it is refused as INFEASIBLE, with numbers,
    while the same with time is served."""
    worker = {
        "time_scale": 1.0,
        "step_base_s": 0.002,
        "prefill_token_s": 0.001,
        "max_model_len": 2_000,
        "num_gpu_blocks": 200,
    }
    async with stack(worker) as s:
        for length in [*range(4, 40, 2), *range(50, 68)]:
            await s.gateway.end_of(await s.gateway.submit(list(range(32, 32 + length)), max_tokens=2))
        long = [32 + i % 90 for i in range(1_500)]
        refused = await s.gateway.end_of(await s.gateway.submit(long, max_tokens=2, remaining_ns=400_000_000))
        assert refused.failed is not None
        assert refused.failed.error.reason == "INFEASIBLE"
        assert float(refused.failed.error.metadata["needs_s"]) > float(refused.failed.error.metadata["has_s"])
        served = await s.gateway.end_of(await s.gateway.submit(long, max_tokens=2, remaining_ns=60_000_000_000))
        assert served.failed is None and len(served.tokens) == 2
