"""The stop `policy-v0`: further rules of vLLM 0.6.3: priority, delay factor, prompts that never fit, adapter slots."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from quire.built_in_model import default_model
from quire.client.messages import RequestOptions
from quire.client.sampling_params import SamplingParams
from quire_tools.tour import arrivals, pictures, step_facts, tiny_adapters, v0_refusals
from quire_tools.tour.pictures import Step
from quire_tools.tour.scene import Scene
from quire_tools.tour.screen import Check, Number, Screen, Stop
from quire_tools.tour.stage import Stage, TourRequest, TourStack

DELAY_FACTOR = 8.0
WATERMARK = 2
NUM_BLOCKS = 16
ADAPTERS = ("one", "two", "three")
_CLOCKS_S = 0.005
"""Allowed difference between readings of the service's two clocks on a busy machine."""
_WIDTH = 40
_OPTIONS: dict[str, Any] = {
    "policy": "vllm-v0",
    "policy_set": ("max_loras=2", "prefix_caching=false", f"watermark_blocks={WATERMARK}"),
    "worker_args": (
        *("--dtype", "float32", "--max-model-len", "256", "--num-gpu-blocks-override", str(NUM_BLOCKS)),
        *("--max-adapters", str(len(ADAPTERS))),
    ),
}


def show(stage: Stage) -> Screen:
    """Four scenes on one stack."""
    with tempfile.TemporaryDirectory() as folder, stage.stack(adapters=_adapters(Path(folder)), **_OPTIONS) as stack:
        scenes = [_priority(stack), _delay(stack), v0_refusals.ignored(stack), v0_refusals.adapter_slots(stack)]
    pairs = [scenes[:2], scenes[2:]]
    return Screen(
        "vLLM 0.6.3: priority, delay, who never fits, adapter slots",
        ("R23", "R47", "R50", "R53", "R57", "R82"),
        [
            f"Policy vllm-v0 on {NUM_BLOCKS} blocks, {WATERMARK} of them kept back; each picture has the steps of one scene.",
            *(pictures.side_by_side(*((scene.heading, scene.picture) for scene in pair)) for pair in pairs),
            pictures.legend(*pictures.TIMETABLE_LEGEND, (step_facts.LEAVES, step_facts.LEAVES_STYLE, "has to leave")),
        ],
        [check for scene in scenes for check in scene.checks],
        [number for scene in scenes for number in scene.numbers],
    )


def _adapters(folder: Path) -> dict[str, Path]:
    return {
        name: tiny_adapters.make_adapter(default_model(), folder / name, seed) for seed, name in enumerate(ADAPTERS)
    }


def _request(name: str, num_prompt: int, num_output: int, *, priority: int = 0) -> TourRequest:
    prompt = [100 + (37 * ord(name[0]) + 11 * place) % 3_000 for place in range(num_prompt)]
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    return TourRequest(name, prompt, params, RequestOptions(priority=priority))


def _timetable(steps: Sequence[Step], names: Sequence[str]) -> Any:
    return pictures.timetable(step_facts.fitting(steps, _WIDTH), names, step_facts.mark_with_leavings)


# --- priority ------------------------------------------------------------------------------------------------------


def _priority(stack: TourStack) -> Scene:
    """A request of higher priority arrives while both places are taken."""
    low = [_request("low-1", 8, 24), _request("low-2", 8, 24)]
    high = _request("high", 8, 8, priority=5)
    stack.admin.set_policy(["max_num_seqs=2"])
    with ExitStack() as opened:
        deltas = []
        for request in low:
            deltas.append(iter(opened.enter_context(stack.start(request))))
            stack.wait(lambda: arrivals.has_come(stack, request.id), f"{request.id} to arrive")  # noqa: B023
        for _ in range(3):
            for delta in deltas:
                next(delta)
        deltas.append(iter(opened.enter_context(stack.start(high))))
        arrivals.read_on(deltas)
    stack.admin.set_policy(["max_num_seqs=16"])
    names = [request.id for request in (*low, high)]
    steps = step_facts.about(stack.steps(), names)
    leavings = step_facts.leavings(steps)
    starts = [number for number, _ in step_facts.shares(steps, "high")][:1]
    gap = starts[0] - leavings[0].step if starts and leavings else 0
    made_room = [e for e in stack.why("high")["episodes"] if e["reason"] == "MADE_ROOM"]
    clean = bool(leavings) and not step_facts.is_prefill(step_facts.by_number(steps)[leavings[0].step])
    return Scene(
        "priority: two places, `high` comes last",
        _timetable(steps, names),
        [
            Number("priority: requests pushed out", len(leavings), "R83"),
            Number("priority: steps until it starts", gap, "R85"),
        ],
        [
            Check(
                "the least important leaves, no more than one",
                [one.name for one in leavings] == ["low-2"] and len(made_room) == 1,
                ", ".join(f"{one.name} in step {one.step}" for one in leavings) or "nobody left",
            ),
            Check("who it leaves for starts in the step after", clean and gap == 1, f"{gap} step later"),
        ],
    )


# --- delay ---------------------------------------------------------------------------------------------------------


def _delay(stack: TourStack) -> Scene:
    """Prompts that arrive after one has run wait for `delay_factor` times its duration while another request decodes."""
    stack.admin.set_policy([f"delay_factor={DELAY_FACTOR}"])
    others = [_request("2nd", 8, 3), _request("3rd", 8, 3)]
    with ExitStack() as opened:
        runner = opened.enter_context(stack.start(_request("run", 8, 200)))
        running = iter(runner)
        next(running)
        streams = [opened.enter_context(stack.start(_request("1st", 100, 12)))]
        arrivals.wait_running(stack, "1st")
        with arrivals.standing_still(
            stack
        ):  # prolongs the first prompt's step, so that the others have not waited long enough
            streams += [opened.enter_context(stack.start(request)) for request in others]
            for request in others:
                stack.wait(lambda: arrivals.has_come(stack, request.id), f"{request.id} to arrive")  # noqa: B023
        for stream in streams:
            arrivals.ended(stream)
        runner.cancel()
    stack.admin.set_policy(["delay_factor=0"])
    return _delay_scene(stack, ["run", "1st", "2nd", "3rd"])


def _delay_scene(stack: TourStack, names: list[str]) -> Scene:
    steps = step_facts.about(stack.steps(), names)
    starts = {name: next(step_facts.shares(steps, name))[0] for name in names}
    episodes = stack.why("2nd")["episodes"]
    told = [episode["numbers"] for episode in episodes if episode["reason"] == "DELAY"]
    waited_s = delay_waited_s(steps, starts["2nd"], episodes[0]["from_ns"])
    latency_s = prompt_latency_s(steps, starts["1st"])
    numbers = told[0] if told else {"waited_s": 0.0, "delay_s": 0.0}
    shown = [step for step in steps if starts["1st"] - 3 <= step["step"]]
    return Scene(
        f"delay_factor={DELAY_FACTOR:g}: prompts wait for company",
        _timetable(shown, names),
        [
            Number("delay: s that the 1st prompt took", latency_s, "R57"),
            Number("delay: steps until the 2nd starts", starts["2nd"] - starts["1st"], "R57"),
        ],
        [
            Check(
                "the delay is so many times the last prompt's latency",
                bool(told) and abs(numbers["delay_s"] - DELAY_FACTOR * latency_s) <= DELAY_FACTOR * _CLOCKS_S,
                f"{numbers['delay_s']:.3f} s = {DELAY_FACTOR:g} x {latency_s:.3f} s",
            ),
            Check(
                "they start when the oldest waited longer, together",
                numbers["waited_s"] <= numbers["delay_s"] <= waited_s + _CLOCKS_S and starts["2nd"] == starts["3rd"],
                f"refused at {numbers['waited_s']:.3f} s, started at {waited_s:.3f} s",
            ),
        ],
    )


def prompt_latency_s(steps: Sequence[Step], number: int) -> float:
    """Seconds from the planning of that step to the planning of the next one."""
    planned = {step["step"]: step["times"]["planned_ns"] for step in steps}
    return float(planned[min(other for other in planned if other > number)] - planned[number]) / 1e9


def delay_waited_s(steps: Sequence[Step], number: int, arrived_ns: int) -> float:
    """Seconds from the arrival to the planning of that step."""
    return float(step_facts.by_number(steps)[number]["times"]["planned_ns"] - arrived_ns) / 1e9


STOP = Stop(
    "policy-v0",
    "Priority, the delay factor, prompts that never fit, and adapter slots, as in vLLM 0.6.3.",
    ("R50", "R53", "R57", "R82"),
    show,
)
