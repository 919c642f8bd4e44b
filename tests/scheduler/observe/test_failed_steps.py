"""What the scheduler's log says of a step that failed: once, what ran in it, where its recording is; and nothing of tokens."""

import asyncio
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli.operators.record import app as record_command
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.observe.metrics.failed_steps import MOST_AT_ONCE, FailedSteps
from scheduler_svc.observe.recording.file_format import Recording
from scheduler_svc.observe.recording.record_buffer import RecordBuffer
from scheduler_svc.observe.step_notifier import StepNotifier
from scheduler_svc.observe.step_observer import StepObserver
from scheduler_svc.observe.step_record import StepOrigin, StepRecord
from tests.scheduler.observe.test_step_log import entry
from tests.scheduler.workers.test_worker_loss import DyingEngine, FailingEngine
from tests.support.cli_lines import parse_quire
from tests.support.scraping import Scrape, scrape
from tests.support.services.harness import Stack, run_async, stack

LOGGER = "scheduler_svc.observe.metrics.failed_steps"
CANARIES = [201, 202, 203, 204, 205, 206]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


async def _fail(s: Stack, first: int) -> Scrape:
    """One request whose first token makes its step fail; beside one that goes on."""
    good = await s.gateway.submit([50, *range(30)], max_tokens=30, request_id="good")
    await s.gateway.tokens_of(good, 2)
    output = await s.gateway.end_of(await s.gateway.submit([first, *CANARIES], max_tokens=20, request_id="bad"))
    assert output.failed is not None
    await s.gateway.end_of(good)
    return await scrape(s.metrics_address)


@run_async
async def test_an_error_of_the_worker(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The composition as `quire steps --decode` has it; the commands in it are real, and fetch a recording of that step."""
    monkeypatch.chdir(tmp_path)
    async with stack(make_engine=FailingEngine, overlap=False, record_segment_steps=3) as s:
        values = await _fail(s, 99)
        [text] = told(caplog)
        record, replay = (shlex.split(command) for command in re.findall(r"`(quire [^`]+)`", text))
        assert parse_quire(record[1:]) == "quire record"
        fetched = await asyncio.to_thread(CliRunner().invoke, record_command, record[2:])
        assert fetched.exit_code == 0, fetched.output
        steps = await s.admin.steps()
    assert parse_quire(replay[1:]) == "quire replay"
    [failed] = [step for step in steps if step.error]
    assert text.startswith(f"step {failed.step} failed, OTHER: the kernel failed\nstep {failed.step}  epoch 1")
    for group in failed.scheduled:
        kind, end = "prefill" if group.prefill else "decode ", group.computed_before + group.tokens
        assert f"  {kind} {group.id}  tokens {group.computed_before}..{end} ({group.tokens})\n" in text
    assert {group.id for group in failed.scheduled} == {"good", "bad"}
    start = int(replay[replay.index("--from-segment") + 1])
    segment = next(Recording(Path(replay[2])).segments(start))
    assert segment.number == start and segment.first_step <= failed.step < segment.first_step + segment.num_steps
    assert f"segment {segment.number}:" in text
    assert values.value("quire_failed_steps_total", reason="OTHER") == 1
    assert not [token for token in CANARIES if str(token) in text.replace(s.admin_address, "")]


@run_async
async def test_output_that_is_not_finite(caplog: pytest.LogCaptureFixture) -> None:
    """Names the sequence; the step itself went well."""
    async with stack(make_engine=FailingEngine, overlap=False, record_ring_bytes=0) as s:
        values = await _fail(s, 98)
    [text] = told(caplog)
    assert re.match(r"step \d+ failed, NOT_FINITE: bad/0: the model's output was not finite", text)
    assert "decode  good" in text and "--record-memory" in text
    assert values.value("quire_failed_steps_total", reason="NOT_FINITE") == 1
    assert values.value("quire_requests_ended_total", status="INTERNAL", reason="STEP_FAILED") == 1


@run_async
async def test_a_lost_worker_and_many_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    """A refused step costs the worker, each time: told with the reason, five at once, the others counted."""
    async with stack(make_engine=DyingEngine, overlap=False, max_worker_losses=8) as s:
        output = await s.gateway.end_of(await s.gateway.submit([97, *CANARIES], request_id="poison"))
        assert output.failed is not None
        values = await scrape(s.metrics_address)
    assert values.value("quire_failed_steps_total", reason="WORKER_LOST") == 8
    texts = told(caplog)
    assert len(texts) == MOST_AT_ONCE
    assert all(", WORKER_LOST: the worker was lost; step" in text and "rows do not fit" in text for text in texts)
    assert all("prefill poison  tokens 0..7 (7)" in text for text in texts)


class _Taken(StepObserver):
    """Keeps the records of steps that ended."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def on_end(self, record: StepRecord) -> None:
        self.records.append(record)


def _lost(step: int, num_groups: int) -> StepRecord:
    """A step whose worker was lost."""
    taken = _Taken()
    steps = StepNotifier([taken])
    plan = StepPlan(step, 0, [entry(f"r{i}/0", blocks=[]) for i in range(num_groups)])
    steps.planned(plan, StepOrigin(epoch=1))
    steps.lost_worker([], why="it went")
    return taken.records[0]


def test_after_a_burst_one_in_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    """What was not told is counted with the next that is; a large batch is cut off."""
    now_s = [0.0]
    failed = FailedSteps(RecordBuffer(0, 0, verbatim=False), lambda: "127.0.0.1:1", lambda: now_s[0])
    for step in range(1, 31):
        failed.on_end(_lost(step, 1))
        now_s[0] += 1.0
    numbers = [int(text.split()[1]) for text in told(caplog)]
    assert numbers == [1, 2, 3, 4, 5, 11, 21]
    assert [text for text in told(caplog) if text.endswith("are not shown; `quire steps` has them")] == told(caplog)[
        -2:
    ]
    assert "\n5 failed steps before it are not shown" in told(caplog)[-2]
    now_s[0] = 100.0
    failed.on_end(_lost(31, 100))
    assert told(caplog)[-1].count("\n  decode  r") == 32 and "\n  and 68 more\n" in told(caplog)[-1]
