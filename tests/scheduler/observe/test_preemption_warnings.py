"""What the running service says about preemptions."""

import logging
import re

import pytest

from tests.support.services.harness import run_async, stack


@run_async
async def test_every_fiftieth_preemption_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """R80: on the 1st, 51st, 101st since the start, with the request and how it left; in between nothing."""
    caplog.set_level(logging.WARNING, logger="scheduler_svc.observe.preemption_warnings")
    async with stack({"num_gpu_blocks": 11}, policy="vllm-v1", max_num_batched_tokens=16, max_num_seqs=8) as s:
        handles = [await s.gateway.submit([40 + i, *range(50, 60 + i)], max_tokens=40) for i in range(24)]
        outputs = [await s.gateway.end_of(handle) for handle in handles]
        num = sum(o.finished.account.num_preemptions for o in outputs if o.finished)
    said = [re.match(r"preemption (\d+) since the start: request \S+, by recompute", m) for m in caplog.messages]
    assert num > 50
    assert [int(match[1]) for match in said if match] == list(range(1, num + 1, 50))
