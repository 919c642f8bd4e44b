"""The lab of a recording: at each step the state that the scheduler was in, whichever step is asked for first."""

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway_svc.lab.app import encode
from gateway_svc.lab.source import Step
from quire_tools.commands import lab as command
from quire_tools.lab.recorded import RecordedLabSource
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.recording.file_format import Recording
from scheduler_svc.observe.recording.replay import Replayer
from scheduler_svc.observe.run_observer import RunObserver
from scheduler_svc.observe.step_record import StepOrigin
from scheduler_svc.observe.timelines import Timelines
from svc_common.errors import ConfigError, NotFound, Unavailable
from tests.support.services.lab_recordings import client, recording
from tests.support.services.scripted_engine import asynchronous

POLICIES = [
    *[("quire", False), ("vllm-v0", False), ("quire", True)],
    *(
        pytest.param(policy, several, marks=pytest.mark.long)
        for policy, several in [
            ("vllm-v1", False),
            ("chitu", False),
            ("chitu-dp", False),
            ("vllm-v0", True),
            ("vllm-v1", True),
        ]
    ),
]


class Course(RunObserver):
    """Looks at everything right after each plan."""

    def __init__(self, found: Recording) -> None:
        self.tables: dict[int, dict[str, list[str]]] = {}
        self.reasons: dict[int, dict[str, tuple[str, str]]] = {}
        self.cached: dict[int, list[str]] = {}
        self.pools: dict[int, set[tuple[str, str, int, int]]] = {}
        self._timelines = Timelines(lambda request_id: True)
        self._core: Scheduler | None = None
        Replayer(self).run(found.segments())

    def on_start(self, core: Scheduler, clock: Callable[[], float]) -> None:
        self._core = core

    def on_plan(self, plan: StepPlan, origin: StepOrigin) -> None:
        assert self._core is not None
        self._timelines.observe(plan.events)
        if plan.is_empty:
            return
        self.tables[plan.step] = self._core.block_tables()
        self.cached[plan.step] = self._core.cached_blocks()
        self.pools[plan.step] = pools(self._core)
        self.reasons[plan.step] = {
            request_id: (episode.queue, episode.reason.value)
            for request_id, request in self._core.state.requests.items()
            if len(request.groups) == 1 and request_id in self._timelines
            for episode in self._timelines.episodes(request_id)[-1:]
            if episode.to_step is None and episode.reason is not Reason.ENDED
        }


def pools(core: Scheduler) -> set[tuple[str, str, int, int]]:
    """Tier, suffix of block names, first name and the one behind the last, of each worker's pools that have blocks."""
    found = set()
    for worker in core.workers:
        for rank, ledger in enumerate(worker.state.cache.ledger.parts()):
            number = worker.state.number + rank
            first, total = len(ledger.gpu.reserved), ledger.gpu.counts().total
            found |= {("g", number, first, first + total), ("c", number, 0, ledger.cpu.counts().total)}
    is_one = len({number for _, number, _, _ in found}) == 1
    return {
        (tier, "" if is_one else f"@{number}", first, end) for tier, number, first, end in found if tier == "g" or end
    }


def rebuilt(steps: list[Step]) -> dict[int, dict[str, list[str]]]:
    """Tables after each step, as the page makes them."""
    tables: dict[str, list[str]] = {}
    found = {}
    for step in steps:
        tables = {} if step.tables.whole else dict(tables)
        for name in step.tables.gone:
            del tables[name]
        tables |= step.tables.changed
        found[step.step] = tables
    return found


@pytest.mark.parametrize(("policy", "several"), POLICIES)
def test_each_step_has_the_state_that_the_scheduler_was_in(policy: str, several: bool, tmp_path: Path) -> None:
    """Tables, cached blocks, queues and reasons as a replay from the beginning has them; asked for in any order, in any pieces."""
    found = recording(tmp_path, policy, several=several)
    course, source, rng = Course(found), RecordedLabSource(found), random.Random(policy)
    numbers = asyncio.run(source.about()).overview.step  # type: ignore[union-attr]
    assert numbers == sorted(course.tables) and len(numbers) > 20
    told, with_reasons = 0, [number for number in numbers if course.reasons[number]]
    for turn in range(8):
        since, limit = rng.choice(numbers if turn else with_reasons), rng.randint(1, 30)
        steps = asyncio.run(source.steps(since, limit))
        assert [step.step for step in steps] == [n for n in numbers if n >= since][:limit]
        for step, tables in rebuilt(steps).items():
            assert tables == course.tables[step]
        for step in steps:
            assert step.snapshot is not None and step.snapshot.cached == course.cached[step.step]
            assert {(p.tier, p.suffix, p.first, p.first + p.total) for p in step.snapshot.pools} == course.pools[
                step.step
            ]
            reasons = {r.id: (r.queue, r.reason) for r in step.snapshot.requests}
            known = {i: r for i, r in course.reasons[step.step].items() if i in reasons}
            assert {i: reasons[i] for i in known} == known
            told += len(known)
    assert told


def test_steps_have_their_results(tmp_path: Path) -> None:
    """Tokens that came are counted; times go forward; the overview says the same as the steps."""
    source = RecordedLabSource(recording(tmp_path, seed=4))
    overview = asyncio.run(source.about()).overview
    assert overview is not None
    steps = asyncio.run(source.steps(0, 200))
    assert sum(sum(step.sampled.values()) for step in steps) > 20
    for i, step in enumerate(steps):
        assert overview.step[i] == step.step and overview.at_ms[i] == step.times.planned_ms
        assert overview.finished_ms[i] == step.times.finished_ms >= step.times.planned_ms
        tokens = {kind: sum(s.tokens for s in step.shares if s.prefill is kind) for kind in (True, False)}
        assert overview.prefill_tokens[i] + overview.decode_tokens[i] == sum(tokens.values())
        assert overview.num_preempted[i] == len(step.preempted)


def test_a_request_says_why_it_waited(tmp_path: Path) -> None:
    """Episodes follow each other without gaps; a request that is not in the recording is not known."""
    source = RecordedLabSource(recording(tmp_path, "vllm-v0"))
    steps = asyncio.run(source.steps(0, 200))
    ids = {share.id for step in steps for share in step.shares}
    waited = 0
    for request_id in ids:
        answer = asyncio.run(source.why(request_id, "", needs=False))
        for one, other in zip(answer.episodes, answer.episodes[1:], strict=False):
            assert one.sample != other.sample or one.to_ms == other.from_ms
        waited += sum(episode.queue != "running" for episode in answer.episodes)
    assert waited > 5
    with pytest.raises(NotFound, match="nobody is not in this recording"):
        asyncio.run(source.why("nobody", "", needs=False))


@asynchronous
async def test_the_routes_of_a_recording(tmp_path: Path) -> None:
    """What the page asks, over HTTP: everything is JSON; wrong questions are 400, unknown requests 404."""
    source = RecordedLabSource(recording(tmp_path))
    async with client(source) as http:
        about = (await http.get("/lab/about")).json()
        assert about["mode"] == "recording" and not about["can_generate"] and about["title"] == "quire-1.rec"
        first = about["overview"]["step"][3]
        steps = (await http.get(f"/lab/steps?since={first}&limit=5")).json()
        assert len(steps) == 5 and steps[0]["step"] == first and steps[0]["tables"]["whole"]
        assert steps == json.loads(encode(await source.steps(first, 5)))
        request_id = steps[0]["shares"][0]["id"]
        assert (await http.get("/lab/why", params={"id": request_id})).json()["id"] == request_id
        for path, status in (
            ("/lab/steps?since=-1", 400),
            ("/lab/steps?limit=many", 400),
            ("/lab/why", 400),
            ("/lab/why?id=" + "x" * 300, 400),
            ("/lab/why?id=nobody", 404),
            ("/metrics", 404),
        ):
            assert (await http.get(path)).status_code == status, path
        ended = await http.get("/lab/stream")
        assert ended.status_code == 200 and "event:" not in ended.text


def test_files_of_no_use_are_refused(tmp_path: Path) -> None:
    """One sentence that says what to do, before anything is served."""
    path = tmp_path / "none.rec"
    path.write_text("nothing")
    result = CliRunner().invoke(command.app, ["--recording", str(path)])
    assert isinstance(result.exception, ConfigError) and "is no recording of quire" in result.exception.message


def test_where_the_lab_of_a_running_stack_is() -> None:
    """No gateway there: what to do. An address that is none: an example."""
    result = CliRunner().invoke(command.app, ["--url", "http://127.0.0.1:9"])
    assert isinstance(result.exception, Unavailable) and "quire up" in result.exception.message
    result = CliRunner().invoke(command.app, ["--url", "nowhere"])
    assert isinstance(result.exception, ConfigError) and "http://127.0.0.1:8001" in result.exception.message
