"""`chunk_s`: a prompt takes only so much of a step in which others decode; alone it takes the whole step."""

import pytest

from scheduler_svc.core.composition import live_change
from scheduler_svc.core.plan import StepResult
from scheduler_svc.core.scheduler import Scheduler
from tests.support.core.builders import answer, shares
from tests.support.core.quire_builders import quire_core, request

_BEAMS = 4
_LIMITS = {"max_model_len": 256, "num_gpu_blocks": 257, "max_num_batched_tokens": 64}


def chunks(core: Scheduler, prompt: int) -> list[dict[str, int]]:
    """Tokens by request of the steps until a prompt of that length is computed, besides a request that decodes."""
    core.add(request("decodes", 4, max_tokens=60))
    while not core.state.requests["decodes"].groups[0].sequences[0].num_output_tokens:
        [plan] = core.schedule(0.0)
        core.update(answer(plan))
    core.add(request("prompt", prompt))
    steps = []
    while sum(step.get("prompt", 0) for step in steps) < prompt:
        [plan] = core.schedule(0.0)
        steps.append({name.partition("/")[0]: number for name, number in shares(plan).items()})
        core.update(answer(plan))
    return steps


def step(core: Scheduler) -> None:
    """One step. The best beams are children of all."""
    [plan] = core.schedule(float(core.step))
    sampled = [e for e in plan.scheduled if e.samples]
    beams = {e.name: [(5 + i, -0.1 * i) for i in range(2 * _BEAMS)] for e in sampled if e.request_id == "beams"}
    tokens = {e.name: [7] for e in sampled if e.name not in beams}
    core.update(StepResult(plan.step, tokens, candidates=beams))


@pytest.mark.parametrize("fast_path", [True, False])
def test_a_prompt_takes_chunks_by_cost_beside_those_that_decode(*, fast_path: bool) -> None:
    """Ten tokens take `chunk_s`, and each running request has one more; who decodes gets its token in every step."""
    core = quire_core(_LIMITS, chunk_s=0.1, compute_token_s=0.01, fast_path=fast_path)
    steps = chunks(core, 63)
    assert [step["prompt"] for step in steps] == [10, 11, 11, 12, 11, 8]
    assert all(step["decodes"] == 1 for step in steps)


@pytest.mark.parametrize(
    ("prompt", "expected"), [(10, [10]), (14, [14]), (16, [8, 8]), (24, [12, 12]), (35, [9, 10, 9, 7])]
)
def test_chunks_leave_no_small_remainder(prompt: int, expected: list[int]) -> None:
    """It would be computed with the next newcomers, and wait for them."""
    core = quire_core(_LIMITS, chunk_s=0.1, compute_token_s=0.01)
    assert [step["prompt"] for step in chunks(core, prompt)] == expected


def test_newcomers_together_are_split_evenly() -> None:
    """Two prompts of seven tokens take one step: a chunk of ten would leave four tokens of the second."""
    core = quire_core(_LIMITS, chunk_s=0.1, compute_token_s=0.01)
    chunks(core, 4)
    core.add(request("a", 7))
    core.add(request("b", 7))
    [plan] = core.schedule(0.0)
    assert (shares(plan)["a"], shares(plan)["b"]) == (7, 7)


def test_a_chunk_may_take_as_long_as_the_shortest_step() -> None:
    """Smaller ones would spend most of their time on reading weights."""
    core = quire_core(_LIMITS, chunk_s=0.1, compute_token_s=0.01, step_s=0.3)
    assert [step["prompt"] for step in chunks(core, 61)] == [31, 30]


@pytest.mark.parametrize(
    "knobs", [{"chunk_s": 0.1}, {"chunk_s": 0.0, "compute_token_s": 0.01}, {"chunk_s": 0.7, "compute_token_s": 0.01}]
)
def test_there_is_no_limit_without_costs_or_where_it_is_above_the_budget(knobs: dict[str, float]) -> None:
    """Of a budget of 64."""
    assert chunks(quire_core(_LIMITS, **knobs), 100)[0] == {"decodes": 1, "prompt": 63}


def test_whole_prompts_are_not_limited() -> None:
    """Without chunked prefill a lower budget would keep a long prompt waiting for as long as anybody decodes."""
    limits = {**_LIMITS, "chunked_prefill": False, "max_num_batched_tokens": 256}
    assert chunks(quire_core(limits, chunk_s=0.1, compute_token_s=0.01), 200) == [{"decodes": 1, "prompt": 200}]


def test_prompts_alone_take_the_whole_step() -> None:
    """Nobody waits for a next token."""
    core = quire_core(_LIMITS, chunk_s=0.1, compute_token_s=0.01)
    core.add(request("a", 40))
    core.add(request("b", 40))
    [plan] = core.schedule(0.0)
    assert plan.num_tokens == 64


def test_a_first_token_in_flight_counts() -> None:
    """Asynchronously the next step is planned before the step that ends the prompt has a result."""
    core = quire_core(_LIMITS, chunk_s=0.1, compute_token_s=0.01, batch_queue=2)
    core.add(request("first", 4))
    [ends_the_prompt] = core.schedule(0.0)
    core.add(request("prompt", 40))
    [plan] = core.schedule(0.0)
    assert (ends_the_prompt.num_tokens, shares(plan)) == (4, {"first": 1, "prompt": 10})


def test_beams_on_the_host_come_back_beside_others() -> None:
    """A group of sequences needs a token for each in one step; with a chunk of one token it would stay there."""
    core = quire_core({"num_gpu_blocks": 22}, chunk_s=0.01, makes_way=True, compute_token_s=0.01, swap_block_s=1e-6)
    core.add(request("beams", 8, max_tokens=20, priority=5, beams=_BEAMS))
    for _ in range(10):
        step(core)
    core.add(request("long", 4, max_tokens=40))
    core.add(request("large", 40, max_tokens=2))
    for is_swapped in (False, True):
        while bool(core.state.swapped) == is_swapped:
            step(core)
    assert core.request("long") is not None


def test_the_limit_can_be_changed_live() -> None:
    """From the next plan on."""
    core = quire_core(_LIMITS, chunk_s=0.1, compute_token_s=0.01)
    live_change.reconfigure(core, core.spec.with_knobs(chunk_s=0.2), core.state.limits)
    assert chunks(core, 100)[0] == {"decodes": 1, "prompt": 20}
