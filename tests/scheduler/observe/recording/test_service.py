"""Recording a running scheduler service, and the commands `quire record` and `quire replay`."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from block_manager.hashing import little_endian
from protos.inference.v1 import admin_pb2
from quire.cli.operators import record as record_command
from quire_tools.commands import replay as replay_command
from quire_tools.replay.request_steps import RequestStepsObserver
from scheduler_svc.observe.recording.file_format import Recording, RecordingError, RecordingWriter
from scheduler_svc.observe.recording.recorder import RecordingCore
from scheduler_svc.observe.recording.replay import replay
from svc_common.errors import ConfigError, FailedPrecondition
from svc_common.net import rpc
from tests.support.core.recorded_lives import recorded
from tests.support.services.harness import Stack, run_async, stack

PROMPT = [101 + 7 * i for i in range(24)]
SLOW = {"time_scale": 1.0, "step_base_s": 0.002, "num_gpu_blocks": 512}


async def _serve(s: Stack, count: int = 6, max_tokens: int = 20) -> None:
    """Requests that share a prompt, one after the other and together, to their ends; one is cancelled."""
    handles = [
        await s.gateway.submit([*PROMPT, 30 + i], max_tokens=max_tokens, request_id=f"r{i}") for i in range(count)
    ]
    gone = await s.gateway.submit(PROMPT, max_tokens=500, request_id="gone")
    await s.gateway.tokens_of(gone, 3)
    await s.gateway.send(cancels=[{"handle": gone}])
    for handle in [*handles, gone]:
        output = await s.gateway.end_of(handle)
        assert output.failed is None, output.failed


async def _parts(s: Stack, **values: Any) -> list[admin_pb2.DumpRecordingResponse]:
    return [part async for part in s.admin.stub.DumpRecording(admin_pb2.DumpRecordingRequest(**values))]


def _save(path: Path, parts: list[admin_pb2.DumpRecordingResponse]) -> Recording:
    ends = [part for part in parts if part.HasField("num_steps")]
    with path.open("wb") as file:
        writer = RecordingWriter(file)
        writer.write(parts[0].beginning)
        writer.write(b"".join(part.data for part in parts))
        writer.finish(num_segments=len(ends), num_steps=sum(part.num_steps for part in ends))
    return Recording(path)


async def _command(app: Any, *arguments: str) -> Any:
    """A command in a thread of its own, as it blocks."""
    return await asyncio.to_thread(CliRunner().invoke, app, list(arguments))


@run_async
@pytest.mark.parametrize("policy", ["quire", "vllm-v0"])
async def test_a_running_scheduler_is_recorded(tmp_path: Path, policy: str) -> None:
    """R201: what the service did, in several segments, is replayed to the last decision; ids are those of `quire steps`."""
    async with stack(SLOW, policy=policy, record_segment_steps=10, enable_prefix_caching=policy == "quire") as s:
        await _serve(s)
        recording = _save(tmp_path / "a.rec", await _parts(s))
        report = replay(recording.segments(), seen := RequestStepsObserver())
        assert report.first_difference is None
        assert recording.num_segments > 2
        assert recording.about["verbatim"] is False
        assert report.steps == recording.num_steps >= len(await s.admin.steps())
        ends = {name: steps.end for name, steps in seen.requests.items()}
        assert ends == {**{f"r{i}": "length" for i in range(6)}, "gone": "abort"}
        shown = {group.id for step in await s.admin.steps() for group in step.scheduled}
        assert shown == set(ends)
        for start in range(recording.num_segments):
            assert replay(recording.segments(start)).identical


@run_async
async def test_tokens_are_recorded_when_asked(tmp_path: Path) -> None:
    """`record_tokens` and its opposite: the prompt's tokens are in the segments, or not one of them is."""
    for verbatim in (True, False):
        async with stack(SLOW, record_tokens=verbatim) as s:
            await _serve(s, count=2)
            recording = _save(tmp_path / "a.rec", await _parts(s))
        [segment] = recording.segments()
        arrays = [segment.snapshot.tokens, *(request.prompt for request in segment.snapshot.requests)]
        arrays += [event.request.prompt for event in segment.events if hasattr(event, "request")]
        found = [token for token in PROMPT if any(little_endian([token]) in array for array in arrays)]
        assert found == (PROMPT if verbatim else [])
        assert recording.about["verbatim"] is verbatim
        assert replay(recording.segments()).identical


@run_async
async def test_the_ring_of_a_service_is_bounded(tmp_path: Path) -> None:
    """Old segments are dropped; a later call takes up where an earlier one ended."""
    async with stack(SLOW, record_segment_steps=5, record_ring_bytes=60_000) as s:
        await _serve(s, max_tokens=40)
        first = await _parts(s)
        assert first[1].segment > 0
        assert replay(_save(tmp_path / "a.rec", first).segments()).identical
        again = await _parts(s, since_segment=first[-1].segment)
        assert {part.segment for part in again[1:]} == {first[-1].segment}


@run_async
async def test_following(tmp_path: Path) -> None:
    """Segments come when they are complete; the rest is fetched afterwards, nothing twice and nothing missing."""
    async with stack(SLOW, record_segment_steps=10) as s:
        call = s.admin.stub.DumpRecording(admin_pb2.DumpRecordingRequest(follow=True))
        parts = [await call.read()]
        serving = asyncio.create_task(_serve(s))
        while sum(part.HasField("num_steps") for part in parts) < 2:
            parts.append(await call.read())
        call.cancel()
        await serving
        rest = await _parts(s, since_segment=parts[-1].segment + 1)
        recording = _save(tmp_path / "a.rec", [*parts, *rest[1:]])
        assert [segment.number for segment in recording.segments()] == list(range(recording.num_segments))
        assert replay(recording.segments()).identical


@run_async
async def test_a_service_that_records_nothing() -> None:
    """Says so, and what to do."""
    async with stack(SLOW, record_ring_bytes=0) as s:
        await _serve(s, count=1)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await _parts(s)
        typed = rpc.from_rpc_error(error.value)
        assert isinstance(typed, FailedPrecondition)
        assert typed.reason == "NOT_RECORDING"


# --- the commands ------------------------------------------------------------------------------------------------------


@run_async
async def test_record_and_replay(tmp_path: Path) -> None:
    """From a running scheduler into a file, and all that can be asked of it."""
    path = tmp_path / "a.rec"
    async with stack(SLOW, record_segment_steps=10) as s:
        nothing = await _command(record_command.app, "--out", str(path), "--admin", s.admin_address)
        assert isinstance(nothing.exception, FailedPrecondition)
        assert list(tmp_path.iterdir()) == []
        serving = asyncio.create_task(_serve(s, max_tokens=60))
        while not await s.admin.steps():
            await asyncio.sleep(0.01)
        told = await _command(record_command.app, "--out", str(path), "--seconds", "0.1", "--admin", s.admin_address)
        assert told.exit_code == 0, told.output
        await serving
        early = Recording(path).num_steps
        await s.gateway.end_of(await s.gateway.submit(PROMPT, max_tokens=5, request_id="later"))
        told = await _command(record_command.app, "--out", str(path), "--admin", s.admin_address)
        assert f"{Recording(path).num_steps:,} steps" in told.stdout
        assert 0 < early < Recording(path).num_steps
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.rec"]
    plain = json.loads((await _command(replay_command.app, str(path), "--json")).stdout)
    assert {key: plain[key] for key in ("identical", "first_difference")} == {
        "identical": True,
        "first_difference": None,
    }
    assert plain["steps"] == Recording(path).num_steps
    assert set(plain["requests"]["r0"]) == {"admitted_steps", "first_token_step", "end_step", "end"}
    assert plain["requests"]["gone"]["end"] == "abort"
    memory = await _command(replay_command.app, str(path), "--memory", "--json")
    assert max(point["saved"] for point in json.loads(memory.stdout)["memory"]) > 0
    assert "identical" in (await _command(replay_command.app, str(path), "--memory", "--from-segment", "1")).stdout
    await _what_if_commands(path, tmp_path)


async def _what_if_commands(path: Path, tmp_path: Path) -> None:
    options = (str(path), "--policy", "vllm-v0", "--set", "max_num_seqs=2")
    values = json.loads((await _command(replay_command.app, *options, "--json")).stdout)
    assert values["predicted"]["ttft_p50_s"] > values["recorded"]["ttft_p50_s"]
    assert values["censored"] == 1
    assert 0 <= values["fit_error"] < 1
    table = await _command(replay_command.app, *options, "--plot", str(tmp_path / "a.svg"))
    assert all(word in table.stdout for word in ("TTFT p99", "lost tokens", "fairness", "censored", "median error"))
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_a_different_replay_ends_with_status_1(tmp_path: Path) -> None:
    """R201: with the first difference, for people and for programs; a what-if of it is refused."""
    life = recorded("vllm-v1", 2)
    decision = next(e for s in life.buffer.segments() for e in s.events if getattr(e, "decisions", None)).decisions[0]
    decision.num_waiting += 5
    life.write(tmp_path / "odd.rec")
    shown = CliRunner().invoke(replay_command.app, [str(tmp_path / "odd.rec")])
    assert shown.exit_code == 1
    assert f"step {decision.step}, num_waiting" in shown.stdout
    told = CliRunner().invoke(replay_command.app, [str(tmp_path / "odd.rec"), "--json"])
    assert told.exit_code == 1
    found = json.loads(told.stdout)["first_difference"]
    assert found == {
        "step": decision.step,
        "field": "num_waiting",
        "recorded": decision.num_waiting,
        "got": decision.num_waiting - 5,
    }
    changed = CliRunner().invoke(replay_command.app, [str(tmp_path / "odd.rec"), "--set", "max_num_seqs=99", "--json"])
    assert isinstance(changed.exception, FailedPrecondition)
    assert f"step {decision.step}: num_waiting differs" in changed.exception.message


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--set", "max_num_seqs"], "is no KEY=VALUE"),
        (["--set", "max_num_seqs=9@0"], "is no step"),
        (["--policy", "vllm-v9"], "unknown policy"),
        (["--set", "block_size=7@3"], "cannot be changed while the scheduler runs"),
        (["--set", "max_num_seqs=9@99999"], "is not in the recording"),
        (["--memory", "--policy", "vllm-v1"], "--memory is about the recording as it is"),
        (["--plot", "x.png"], "--plot shows a what-if"),
        (["--from-segment", "999"], "has no segment 999"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: list[str], why: str) -> None:
    """ConfigErrors, which end the command with status 2."""
    recorded("vllm-v1", 2, changes=False).write(tmp_path / "a.rec")
    error = CliRunner().invoke(replay_command.app, [str(tmp_path / "a.rec"), *options]).exception
    assert isinstance(error, ConfigError)
    assert why in error.message


def test_a_file_that_is_no_recording(tmp_path: Path) -> None:
    """RecordingError, a ConfigError."""
    (tmp_path / "a.rec").write_text("hello")
    error = CliRunner().invoke(replay_command.app, [str(tmp_path / "a.rec")]).exception
    assert isinstance(error, RecordingError)


def test_a_recorder_that_fails_stops_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core goes on; it is said once that nothing is recorded any more."""
    life = recorded("vllm-v1", 2)
    core = life.core
    assert isinstance(core, RecordingCore)
    monkeypatch.setattr(life.buffer, "add", lambda *args, **values: 1 / 0)
    for _ in range(3):
        core.schedule(1e6)
        core.abort(["nobody"])
    assert not core.is_recording
    assert [record.getMessage() for record in caplog.records] == [
        "recording failed and is off from here on; scheduling goes on"
    ]
