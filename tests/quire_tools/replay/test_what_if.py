"""What-ifs over a recorded life: exact up to the step they name, admitted by just enough, and near to what really would happen."""

import functools
import random
from dataclasses import replace
from typing import Any

import pytest

from quire_tools.replay.observed import Observed
from quire_tools.replay.request_steps import RequestSteps, RequestStepsObserver
from quire_tools.replay.what_if import one_life, what_if
from quire_tools.simulation.arrivals import Arrival
from quire_tools.simulation.cost_model import CostModel, StepShape
from quire_tools.simulation.history import Figures, SimulationHistory
from quire_tools.simulation.simulation import Simulation
from quire_tools.simulation.token_model import EOS, PseudoTokens
from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepOutcome, StepPlan, StepResult
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import StopRules
from scheduler_svc.observe.counterfactual.past_step import PastStep
from scheduler_svc.observe.plan_record import PlanFreezer
from scheduler_svc.observe.recording import changes, codec
from scheduler_svc.observe.recording.changes import Change
from scheduler_svc.observe.recording.difference import first_difference
from scheduler_svc.observe.recording.events import PlanEvent
from scheduler_svc.observe.recording.recorder import RecordingCore
from scheduler_svc.observe.recording.replay import Replayer, replay
from scheduler_svc.observe.recording.segment_buffer import RecordingSegment, SegmentBuffer
from scheduler_svc.observe.recording.token_alias import TokenAlias
from svc_common.errors import ConfigError, OutOfRange
from tests.support.core.builders import answer, make_request
from tests.support.core.recorded_lives import recorded

COST = CostModel(base_s=8e-3, prefill_token_s=1e-4, decode_seq_s=2e-4, context_token_s=1e-7, schedule_s=1e-3)


class _Clock:
    now = 0.0


def _contention() -> tuple[list[RecordingSegment], int]:
    """A request that fills the pool but for 2 blocks, and from some step on another that needs 4; the step after it came."""
    limits = CoreLimits(4, 17, 64, max_num_seqs=4, max_num_batched_tokens=64)
    buffer = SegmentBuffer(3, 2**30)
    alias = TokenAlias(b"key")
    core: Any = RecordingCore(presets.build("vllm-v1", limits, rename=alias), buffer, lambda: _Clock.now)
    core.add(make_request("big", 52, 8))
    for step in range(3):
        _step(core, step)
    core.add(make_request("next", 14, 2, arrival=2.5))
    found = core.step + 1
    for step in range(3, 14):
        _step(core, step)
    return [codec.decode(codec.encode(segment, alias)) for segment in buffer.segments()], found


def _step(core: Any, step: int) -> None:
    """Half a second at the worker."""
    _Clock.now = float(step)
    [plan] = core.schedule(_Clock.now)
    _Clock.now += 0.5
    core.update(answer(plan), _Clock.now)


def _request_steps(segments: list[RecordingSegment]) -> dict[str, RequestSteps]:
    seen = RequestStepsObserver()
    assert replay(segments, seen).identical
    return seen.requests


def _admitted(plans: list[StepPlan]) -> bool:
    return any(entry.request_id == "next" for plan in plans for entry in plan.scheduled)


def test_just_enough_admits() -> None:
    """R136: 2 blocks are free, 4 are needed: with 2 more it starts in that very step, with 1 more it does not."""
    segments, step = _contention()
    ask = PastStep.at(segments, step)
    assert [_admitted(ask({"num_gpu_blocks": 17 + extra})) for extra in (0, 1, 2, 1, 0)] == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert _admitted(PastStep.at(segments, step)({"num_gpu_blocks": 19}))
    for extra in (1, 2):
        found = what_if(segments, None, [Change(step, {"num_gpu_blocks": 17 + extra})])
        assert found.from_step == step
        assert (step in found.requests["next"].admitted_steps) is (extra == 2)
    recorded_steps = _request_steps(segments)["next"].admitted_steps
    assert recorded_steps
    assert recorded_steps[0] > step


def test_changes_hold_from_their_step_on() -> None:
    """Two changes: each from its own step, both to the end."""
    segments, step = _contention()
    found = what_if(
        segments, None, [Change(step, {"max_num_seqs": 1}), Change(step + 2, {"num_gpu_blocks": 30, "max_num_seqs": 4})]
    )
    assert found.requests["next"].admitted_steps == [step + 2]


def test_without_a_change_nothing_differs() -> None:
    """R201: the value that was recorded, from any step on, makes the recorded decisions as far as they do not hang on time."""
    segments, step = _contention()
    history = _request_steps(segments)
    for at in (1, step, step + 2):
        found = what_if(segments, None, [Change(at, {"num_gpu_blocks": 17})])
        assert {n: r.admitted_steps for n, r in found.requests.items()} == {
            n: r.admitted_steps for n, r in history.items()
        }


@pytest.mark.parametrize("policy", presets.policy_names())
def test_probes_repeat_the_recorded_step(policy: str) -> None:
    """R201: asked without changes, at random steps of a life with everything in it, the decision is the recorded one."""
    segments = recorded(policy, 5, num_events=60).segments()
    calls = [e for s in segments for e in s.events if isinstance(e, PlanEvent) and e.decisions]
    for event in random.Random(1).sample(calls, 2):
        ask = PastStep.at(segments, event.decisions[0].step)
        for _ in range(2):
            for want, plan in zip(event.decisions, ask({}), strict=True):
                assert first_difference(want, PlanFreezer().of(plan)) is None


def test_what_if_of_a_model_with_cache_groups() -> None:
    """Its groups are those of the recording under every policy; one that keeps one table for all layers is refused."""
    segments = one_life(recorded("vllm-v1", 3, grouped=True, changes=False).segments())
    assert segments[0].about["limits"]["cache_windows"]
    assert what_if(segments, "quire", []).num_requests == what_if(segments, None, []).num_requests > 0
    with pytest.raises(ConfigError, match="keeps one block table for all layers"):
        what_if(segments, "vllm-v0", [])


def test_what_if_of_a_model_with_states() -> None:
    """Its states are those of the recording under every policy; one of v0 is refused."""
    segments = one_life(recorded("vllm-v1", 3, states=True, changes=False).segments())
    assert segments[0].about["limits"]["num_state_blocks"]
    assert what_if(segments, "quire", []).num_requests == what_if(segments, None, []).num_requests > 0
    with pytest.raises(ConfigError, match="keeps no states"):
        what_if(segments, "vllm-v0", [])


def test_steps_that_are_not_there() -> None:
    """Before the first and behind the last."""
    segments, _ = _contention()
    last = sum(segment.num_steps for segment in segments)
    with pytest.raises(OutOfRange, match=f"does not hold step {last + 1}"):
        PastStep.at(segments, last + 1)
    with pytest.raises(OutOfRange):
        PastStep.at(segments[1:], 1)
    with pytest.raises(ConfigError, match=f"step {last + 5} is not in the recording, which has steps 1 to {last}"):
        what_if(segments, None, [Change(last + 5, {"max_num_seqs": 2})])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("max_num_seqs", "is no KEY=VALUE"),
        ("max_num_seqs=3@x", "'x' is no step"),
        ("max_num_seqs=3@0", "'0' is no step"),
        ("max_num_seqs=many@3", "must be a whole number"),
        ("max_num_seq=3", "did you mean max_num_seqs"),
        ("num_gpu_blocks=0", "must be at least"),
    ],
)
def test_changes_that_are_none(text: str, why: str) -> None:
    """ConfigErrors that repeat what was written."""
    with pytest.raises(ConfigError, match=why) as error:
        changes.from_sets([text])
    assert text in error.value.message


def test_changes_are_read() -> None:
    """By step, values in their types; several of one step together."""
    texts = ["delay_factor=0.5@7", "max_num_seqs=3", "num_gpu_blocks=99@7", "preemption_mode=null@3"]
    assert changes.from_sets(texts) == [
        Change(None, {"max_num_seqs": 3}),
        Change(3, {"preemption_mode": None}),
        Change(7, {"delay_factor": 0.5, "num_gpu_blocks": 99}),
    ]


def test_a_change_that_cannot_be() -> None:
    """Live or at all: what is fixed, and what the pool cannot give."""
    segments, step = _contention()
    with pytest.raises(ConfigError, match="cannot be changed while the scheduler runs"):
        what_if(segments, None, [Change(step, {"cache": "quire"})])
    with pytest.raises(ConfigError, match=f"at step {step + 1}: num_gpu_blocks=4"):
        what_if(segments, None, [Change(step, {"max_num_seqs": 3}), Change(step + 1, {"num_gpu_blocks": 4})])


def test_only_one_life() -> None:
    """A core that was built anew is another one: what-ifs are about the first of them."""
    segments, _ = _contention()
    other = replace(segments[1], goes_on=False)
    assert one_life([segments[0], other, segments[2]]) == [segments[0]]
    assert one_life(segments) == segments


# --- against real runs, on simulated workers ---------------------------------------------------------------------------


def _arrivals(seed: int) -> list[Arrival]:
    """A few dozen requests, close enough together that they wait for each other."""
    rng = random.Random(seed)
    at_s, found = 0.0, []
    for i in range(60):
        at_s += rng.expovariate(40.0)
        prompt = [rng.randrange(1, 30_000) for _ in range(rng.randint(20, 200))]
        stop = StopRules(rng.randint(10, 60), eos_token_ids=frozenset([EOS]))
        found.append(Arrival(at_s, Request(f"r{i}", prompt, stop, at_s)))
    return found


class _Timed(RecordingCore):
    """Results say how long the worker took, as those of real workers do."""

    def schedule(self, now: float, worker: int | None = None) -> list[StepPlan]:
        plans = super().schedule(now, worker)
        self.shapes = {**getattr(self, "shapes", {}), **{plan.step: StepShape.of(plan, 16) for plan in plans}}
        return plans

    def update(self, result: StepResult, now: float | None = None) -> StepOutcome:
        return super().update(replace(result, duration_s=COST.step_s(self.shapes.pop(result.step))), now)


class _SimulatedClock:
    """The clock of a simulation that is made after the core it reads the time for."""

    simulation: Simulation | None = None

    def __call__(self) -> float:
        return 0.0 if self.simulation is None else self.simulation._events.now


def _run(
    policy: str, num_seqs: int, buffer: SegmentBuffer | None = None, alias: TokenAlias | None = None
) -> SimulationHistory:
    """A real run of that policy, recorded where there is a buffer."""
    limits = CoreLimits(16, 400, 512, max_num_seqs=num_seqs, max_num_batched_tokens=512)
    core: Any = presets.build(policy, limits, rename=alias)
    clock = _SimulatedClock()
    if buffer is not None:
        core = _Timed(core, buffer, clock)
    clock.simulation = Simulation(core, _arrivals(1), PseudoTokens(3, eos_every=50), COST)
    return clock.simulation.run()


@functools.cache
def _recorded_run() -> tuple[Figures, list[bytes]]:
    """Figures and encoded recording of a run of `vllm-v1` with six places."""
    buffer, alias = SegmentBuffer(200, 2**30), TokenAlias(b"key")
    was = _run("vllm-v1", 6, buffer, alias).figures()
    return was, [codec.encode(segment, alias) for segment in buffer.segments()]


def test_predictions_are_near() -> None:
    """The recorded policy with twice as many places, and two others: medians of TTFT and TPOT within 20 % of a real run of them."""
    was, recording = _recorded_run()
    segments = [codec.decode(segment) for segment in recording]
    assert replay(segments).identical
    for policy, num_seqs in ((None, 12), ("vllm-v0", 12), ("quire", 12)):
        found = what_if(segments, policy, [Change(None, {"max_num_seqs": num_seqs})])
        predicted, real = found.predicted.figures(), _run(policy or "vllm-v1", num_seqs).figures()
        assert found.fit.error < 0.1
        assert found.num_censored == 0
        assert predicted.num_done == real.num_done == 60
        assert predicted.ttft_p50_s == pytest.approx(real.ttft_p50_s, rel=0.2)
        assert predicted.tpot_p50_s == pytest.approx(real.tpot_p50_s, rel=0.2)
        assert (
            abs(predicted.ttft_p50_s - was.ttft_p50_s) > 0.3 * was.ttft_p50_s
        )  # it was not simply told what was recorded


def test_recorded_figures_are_those_of_the_run() -> None:
    """Times are read from the recording as the run itself had them."""
    was, recording = _recorded_run()
    observed = Observed()
    Replayer(*observed.observers).run(codec.decode(segment) for segment in recording)
    observed.close()
    seen = observed.history.figures()
    assert (seen.num_done, seen.num_preemptions, seen.num_lost_tokens) == (
        was.num_done,
        was.num_preemptions,
        was.num_lost_tokens,
    )
    assert seen.ttft_p50_s == pytest.approx(was.ttft_p50_s, rel=0.02)
    assert seen.tpot_p99_s == pytest.approx(was.tpot_p99_s, rel=0.02)


def test_which_requests_are_censored() -> None:
    """Requests that the recording does not see end: counted, and ended where it leaves them."""
    segments = [codec.decode(segment) for segment in _recorded_run()[1]]
    cut = segments[: len(segments) // 2]
    found = what_if(cut, "vllm-v0", [])
    unfinished = [name for name, steps in _request_steps(cut).items() if steps.end is None]
    assert found.num_censored == len(unfinished) > 3
    assert found.predicted.figures().num_censored == 0
    assert not found.predicted.has_stalled
