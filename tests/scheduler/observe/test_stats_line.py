"""The scheduler's line of statistics (R5): readable, parsed here, with the numbers of /metrics; quiet while nothing happens."""

import asyncio
import logging
import re

import pytest

from svc_common.observability.log_format import STATS_LOGGER
from tests.support.scraping import scrape
from tests.support.services.harness import eventually, run_async, stack

LINE = re.compile(
    r"(?P<running>\d+) running, (?P<waiting>\d+) waiting, (?P<swapped>\d+) swapped; "
    r"blocks (?P<gpu>-|[\d.]+ %) of (?P<gpu_total>\d+) gpu, (?P<cpu>-|[\d.]+ %) of (?P<cpu_total>\d+) cpu; "
    r"prompt (?P<prompt_rate>[\d.]+) tokens/s, output (?P<output_rate>[\d.]+) tokens/s; "
    r"prefix hits (?P<hits>-|[\d.]+ %); (?P<preempted>\d+) preempted; "
    r"(?P<steps>\d+) steps, (?P<prompt_steps>\d+) with prompts, (?P<tokens>\d+) tokens, "
    r"p50 (?P<p50>-|[\d.]+ ms), p99 (?P<p99>-|[\d.]+ ms)(; (?P<failed>\d+) FAILED)?"
)
SUMS = {
    "steps": "quire_steps_total",
    "prompt_steps": "quire_prompt_steps_total",
    "tokens": "quire_step_tokens_total",
    "preempted": "quire_preemptions_total",
}


def said(caplog: pytest.LogCaptureFixture) -> list[re.Match[str]]:
    lines = [record.getMessage() for record in caplog.records if record.name == STATS_LOGGER]
    found = [LINE.fullmatch(line) for line in lines]
    assert None not in found, lines
    return [match for match in found if match is not None]


@run_async
async def test_lines_add_up_to_the_metrics(caplog: pytest.LogCaptureFixture) -> None:
    """Of counters the lines' sums are the metrics' values; times lie in their range; then there is silence."""
    caplog.set_level(logging.INFO, STATS_LOGGER)
    values = {"num_gpu_blocks": 24, "block_size": 4}
    async with stack(values, policy="vllm-v1", stats_interval_s=0.1) as s:
        for handle in [await s.gateway.submit([first, *range(20, 40)], max_tokens=40) for first in (1, 2, 1, 2, 3)]:
            await s.gateway.end_of(handle)
        told = await scrape(s.metrics_address)
        all_steps = told.total("quire_steps_total")
        await eventually(lambda: sum(int(line["steps"]) for line in said(caplog)) >= all_steps, "the last line")
        lines = said(caplog)
        await asyncio.sleep(0.3)
        assert len(said(caplog)) == len(lines)
        steps = await s.admin.steps()
    assert {name: sum(int(line[name]) for line in lines) for name in SUMS} == {
        name: told.total(metric) for name, metric in SUMS.items()
    }
    assert told.total("quire_steps_total") == len(steps) and told.total("quire_preemptions_total") > 0
    times = [float(line[name].split()[0]) for line in lines for name in ("p50", "p99") if line[name] != "-"]
    longest = max(step.duration_ns for step in steps) / 1e6
    assert times and all(0 <= took <= longest + 0.01 for took in times)
    assert {line["gpu_total"] for line in lines} == {"23"}
    assert any(line["hits"] not in {"-", "0.0 %"} for line in lines) and any(
        float(line["output_rate"]) for line in lines
    )


@run_async
async def test_zero_is_never(caplog: pytest.LogCaptureFixture) -> None:
    """`--stats-interval-s 0`."""
    caplog.set_level(logging.INFO, STATS_LOGGER)
    async with stack(stats_interval_s=0) as s:
        await s.gateway.end_of(await s.gateway.submit([1, 2, 3]))
        await asyncio.sleep(0.1)
    assert not said(caplog)
