"""The stop `policy-v0`: further rules of vLLM 0.6.3: priority, delay factor, prompts that never fit, adapter slots."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from quire.built_in_model import default_model
from quire.client.messages import RequestOptions
from quire_tools.tour import arrivals, pictures, step_facts, tiny_adapters, v0_refusals
from quire_tools.tour.pictures import Step
from quire_tools.tour.scenario import request, tiny_worker
from quire_tools.tour.screen import Check, Number, Scene, declared
from quire_tools.tour.stage import Stage, TourStack, ended

_DELAY_FACTOR = 8.0
_WATERMARK, _NUM_BLOCKS = 2, 16
_ADAPTERS = ("one", "two", "three")
_CLOCKS_S = 0.005
"""Allowed difference between readings of the service's two clocks on a busy machine."""
_OPTIONS: dict[str, Any] = {
    "policy": "vllm-v0",
    "policy_set": ("max_loras=2", "prefix_caching=false", f"watermark_blocks={_WATERMARK}"),
    "worker_args": tiny_worker(256, _NUM_BLOCKS, "--max-adapters", str(len(_ADAPTERS))),
}


def _observe(stage: Stage) -> list[Scene]:
    """Four scenes on one stack."""
    with tempfile.TemporaryDirectory() as folder:
        adapters = {
            name: tiny_adapters.make_adapter(default_model(), Path(folder, name), seed)
            for seed, name in enumerate(_ADAPTERS)
        }
        with stage.stack(adapters=adapters, **_OPTIONS) as stack:
            return [scene(stack) for scene in (_priority, _delay, v0_refusals.ignored, v0_refusals.adapter_slots)]


def _picture(scenes: Sequence[Scene]) -> Iterator[RenderableType]:
    for pair in (scenes[:2], scenes[2:]):
        yield pictures.side_by_side(*((scene.heading, scene.picture) for scene in pair))
    yield pictures.legend(*pictures.TIMETABLE_LEGEND, step_facts.PREEMPTED_LEGEND)


def _timetable(steps: Sequence[Step], names: Sequence[str]) -> Text:
    return pictures.timetable(
        step_facts.fitting(steps, v0_refusals.TIMETABLE_WIDTH), names, step_facts.mark_preemptions
    )


# --- priority ------------------------------------------------------------------------------------------------------


def _priority(stack: TourStack) -> Scene:
    """A request of higher priority arrives while both places are taken."""
    low = [request("low-1", 8, 24), request("low-2", 8, 24)]
    high = request("high", 8, 8, options=RequestOptions(priority=5))
    stack.admin.set_policy(["max_num_seqs=2"])
    with ExitStack() as opened:
        deltas = [iter(arrivals.arrive(stack, one, opened)) for one in low]
        for _ in range(3):
            for delta in deltas:
                next(delta)
        deltas.append(iter(opened.enter_context(stack.start(high))))
        arrivals.read_on(deltas)
    stack.admin.set_policy(["max_num_seqs=16"])
    names = [one.id for one in (*low, high)]
    steps = step_facts.about(stack.steps(), names)
    preemptions = step_facts.preemptions(steps)
    starts = [number for number, _ in step_facts.shares(steps, "high")][:1]
    gap = starts[0] - preemptions[0].step if starts and preemptions else 0
    made_room = [e for e in stack.why("high")["episodes"] if e["reason"] == "MADE_ROOM"]
    clean = bool(preemptions) and not step_facts.is_prefill(step_facts.by_number(steps)[preemptions[0].step])
    return Scene(
        "priority: two places, `high` arrives last",
        _timetable(steps, names),
        [
            Number("priority: requests preempted", len(preemptions)),
            Number("priority: steps until it starts", gap),
        ],
        [
            Check(
                "the least important is preempted, no other",
                [one.name for one in preemptions] == ["low-2"] and len(made_room) == 1,
                ", ".join(f"{one.name} in step {one.step}" for one in preemptions) or "none",
            ),
            Check("the urgent request starts in the next step", clean and gap == 1, f"{gap} step later"),
        ],
    )


# --- delay ---------------------------------------------------------------------------------------------------------


def _delay(stack: TourStack) -> Scene:
    """Prompts that arrive after one has run wait for `delay_factor` times its duration while another request decodes."""
    stack.admin.set_policy([f"delay_factor={_DELAY_FACTOR}"])
    with ExitStack() as opened:
        runner = opened.enter_context(stack.start(request("run", 8, 200)))
        reading = iter(runner)
        next(reading)
        streams = [opened.enter_context(stack.start(request("1st", 100, 12)))]
        arrivals.wait_running(stack, "1st")
        with arrivals.standing_still(
            stack
        ):  # prolongs the first prompt's step: the others have waited too short a time
            started = [opened.enter_context(stack.start(request(name, 8, 3))) for name in ("2nd", "3rd")]
            for name in ("2nd", "3rd"):
                stack.wait(lambda: arrivals.has_arrived(stack, name), f"{name} to arrive")  # noqa: B023
        for stream in (*streams, *started):
            ended(stream)
        runner.cancel()
    stack.admin.set_policy(["delay_factor=0"])
    return _delay_scene(stack, ["run", "1st", "2nd", "3rd"])


def _delay_scene(stack: TourStack, names: list[str]) -> Scene:
    steps = step_facts.about(stack.steps(), names)
    starts = {name: next(step_facts.shares(steps, name))[0] for name in names}
    episodes = stack.why("2nd")["episodes"]
    told = [episode["numbers"] for episode in episodes if episode["reason"] == "DELAY"]
    planned = {step["step"]: int(step["times"]["planned_ns"]) for step in steps}
    after = min(number for number in planned if number > starts["1st"])
    latency_s = (planned[after] - planned[starts["1st"]]) / 1e9
    waited_s = (planned[starts["2nd"]] - episodes[0]["from_ns"]) / 1e9
    behind = starts["3rd"] - starts["2nd"]
    numbers = told[0] if told else {"waited_s": 0.0, "delay_s": 0.0}
    return Scene(
        f"delay_factor={_DELAY_FACTOR:g}: prompts wait for others",
        _timetable([step for step in steps if starts["1st"] - 3 <= step["step"]], names),
        [
            Number("delay: s that the 1st prompt took", latency_s),
            Number("delay: steps until the 2nd starts", starts["2nd"] - starts["1st"]),
        ],
        [
            Check(
                "the delay is the factor times the last prompt's latency",
                bool(told) and abs(numbers["delay_s"] - _DELAY_FACTOR * latency_s) <= _DELAY_FACTOR * _CLOCKS_S,
                f"{numbers['delay_s']:.3f} s = {_DELAY_FACTOR:g} x {latency_s:.3f} s",
            ),
            Check(
                "the 2nd starts when it waited longer, then the 3rd",
                # The 3rd arrived later: at the next step at the latest, the delay is that of the 2nd, a short prompt.
                numbers["waited_s"] <= numbers["delay_s"] <= waited_s + _CLOCKS_S and 0 <= behind <= 1,
                f"refused at {numbers['waited_s']:.3f} s, started at {waited_s:.3f} s, the 3rd {behind} steps later",
            ),
        ],
    )


STOP = declared(
    "policy-v0",
    "Priority, the delay factor, prompts that never fit, and adapter slots, as in vLLM 0.6.3.",
    "docs/policies.md#keys",
    title="vLLM 0.6.3: priority, delay, prompts that never fit, adapter slots",
    text=f"Policy vllm-v0 on {_NUM_BLOCKS} blocks, {_WATERMARK} of them kept free; each picture has the steps of one scene.",
    observe=_observe,
    picture=_picture,
    checks=lambda scenes: [check for scene in scenes for check in scene.checks],
    numbers=lambda scenes: [number for scene in scenes for number in scene.numbers],
)
