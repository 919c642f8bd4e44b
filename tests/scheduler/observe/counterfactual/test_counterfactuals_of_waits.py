"""What `quire why` names is true: replayed with just enough, the request is let in at that step; with one unit less it is not."""

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from protos.inference.v1 import admin_pb2
from quire.operators import recordings
from quire.operators.admin import AdminClient
from quire.operators.why import why_json
from scheduler_svc.core.reasons import Reason
from scheduler_svc.observe.counterfactual.live_search import by_worth
from scheduler_svc.observe.counterfactual.past_step import PastStep
from scheduler_svc.observe.recording.file_format import Recording
from scheduler_svc.observe.timelines import WaitEpisode
from tests.support.services.harness import run_async, stack

SLOW = {"time_scale": 1.0, "step_base_s": 0.004, "num_gpu_blocks": 40}


@pytest.mark.parametrize("asked", [(8,), pytest.param(range(9), marks=pytest.mark.long)], ids=len)
@run_async
async def test_each_wait_names_a_knob_and_a_value_that_would_have_done(
    asked: Sequence[int], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Asked of the running service, checked against its own recording."""
    rng = random.Random(4)
    async with stack(SLOW, max_num_seqs=4, max_num_batched_tokens=64) as s:
        handles = []
        for i in range(9):
            prompt = [rng.randrange(32, 120) for _ in range(rng.randrange(5, 50))]
            handles.append(await s.gateway.submit(prompt, max_tokens=rng.randrange(4, 30), request_id=f"r{i}"))
        for handle in handles:
            await s.gateway.end_of(handle)
        path = tmp_path / "it.rec"
        await asyncio.to_thread(fetch, s.admin_address, path)
        answers = []
        for i in asked:
            request = admin_pb2.ExplainRequestRequest(request_id=f"r{i}", needs=True)
            answers.append(why_json(await s.admin.stub.ExplainRequest(request)))
    segments = list(Recording(path).segments())
    waits = [(a["id"], e) for a in answers for e in a["episodes"] if e["queue"] == "waiting"]
    named = [(name, e, needs_of(e)) for name, e in waits if needs_of(e)]
    assert len(named) >= max(1, 2 * len(asked) // 3)
    for request_id, episode, needs in named:
        probe = PastStep.at(segments, episode["from_step"])
        assert is_let_in(probe, request_id, needs), (request_id, episode)
        for key in needs:
            assert not is_let_in(probe, request_id, {**needs, key: needs[key] - 1}), (request_id, episode)
    record_property("size", f"counterfactuals of waits: {len(asked)} requests, {len(named)} waits with a value")


def needs_of(episode: dict[str, Any]) -> dict[str, int]:
    numbers = episode["numbers"]
    return {numbers["key"]: numbers["value"]} if "key" in numbers else numbers.get("needs", {})


def fetch(admin_address: str, path: Path) -> None:
    """As `quire record` does."""
    with AdminClient(admin_address) as client, recordings.written(path) as writer:
        fetched = recordings.Fetch(client, writer, lambda fetch: None)
        fetched.held()
        fetched.finish()


def is_let_in(probe: PastStep, request_id: str, values: dict[str, int]) -> bool:
    events = [e for plan in probe(values) for e in plan.events if e.request_id == request_id]
    return any(e.reason is Reason.RUNNING for e in events)


def test_plain_waits_are_searched_first_and_long_ones_before_short_ones() -> None:
    """The time of a search is bounded: what most often has an answer, and explains most, comes first."""
    reasons = [Reason.MAX_SEQS, Reason.NEED_BLOCKS, Reason.RESULT_PENDING, Reason.TOKEN_BUDGET, Reason.NEED_BLOCKS]
    lengths = [9.0, 1.0, 9.0, 2.0, None]
    episodes = [
        WaitEpisode("waiting", reason, 0, i, i + 1, 0.0, length)
        for i, (reason, length) in enumerate(zip(reasons, lengths, strict=True))
    ]
    assert by_worth(episodes) == [4, 3, 1, 0]
