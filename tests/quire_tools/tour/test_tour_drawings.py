"""Pictures of `quire tour` without a stack: lanes in time, plots, what steps say of requests, adapters without torch."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from safetensors import safe_open

from quire.built_in_model import default_model
from quire.client.outputs import RequestOutput
from quire_tools.tour import step_facts, timelines, tiny_adapters
from quire_tools.tour.plots import Plot, Series
from quire_tools.tour.scenario import Observation
from quire_tools.tour.stops import skew
from quire_tools.tour.stops.chitu_threshold import OUTPUT_TOKENS, thresholds_of
from quire_tools.tour.timelines import TimelineSpan


def step(number: int, *groups: tuple[str, int, int, bool], left: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """(id, tokens computed before, tokens, prefill) each."""
    scheduled = [
        {"id": name, "seqs": [f"{name}/0"], "computed_before": before, "tokens": tokens, "prefill": prefill}
        for name, before, tokens, prefill in groups
    ]
    return {
        "step": number,
        "scheduled": scheduled,
        "preempted": [[name, "recompute"] for name in left],
        "sampled": {f"{name}/0": [1] for name, *_ in groups},
        **more,
    }


def timed(planned: int, schedule: int, started: int, model: int, finished: int, queued: int = 0) -> dict[str, Any]:
    times = {"planned_ns": planned, "schedule_ns": schedule, "started_ns": started, "finished_ns": finished}
    return {"times": {**times, "cache_ns": 0, "prepare_ns": 0, "model_ns": model, "sample_ns": 0, "queued_ns": queued}}


# --- lanes in time -------------------------------------------------------------------------------------------------


def test_a_steps_times_become_spans() -> None:
    """Planning, lying at the worker, running, in flight: as StepTimes has them."""
    one = timed(100, 5, 120, 40, 170, queued=8)
    assert (timelines.planned(one).start_ns, timelines.planned(one).end_ns) == (100, 105)
    assert (timelines.queued(one).start_ns, timelines.queued(one).end_ns) == (112, 120)
    assert (timelines.run(one).start_ns, timelines.run(one).end_ns) == (120, 160)
    assert timelines.in_flight(one).duration_ns == 70


def test_gaps_and_what_is_at_once() -> None:
    """Touching spans have no gap between them and are not at the same time; the order in which they are given is of no account."""
    spans = [TimelineSpan(40, 60, "b"), TimelineSpan(0, 30, "a"), TimelineSpan(60, 100, "c")]
    assert timelines.gaps(spans) == [10, 0]
    assert timelines.idle_share(spans) == pytest.approx(0.1)
    assert timelines.most_at_once(spans) == 1
    assert timelines.most_at_once([*spans, TimelineSpan(50, 70, "d")]) == 2
    assert timelines.idle_share([TimelineSpan(5, 5, "a")]) == 0


def test_lanes_are_as_wide_as_they_say_and_short_spans_are_seen() -> None:
    """Each row has its columns, what lies outside is left out, a span of no width takes one column."""
    rows = {
        "one": [TimelineSpan(0, 50, "1"), TimelineSpan(50, 100, "2")],
        "two": [TimelineSpan(99, 99, "x"), TimelineSpan(200, 300, "y")],
    }
    lines = timelines.lanes(rows, 0, 100, width=20).plain.splitlines()
    assert lines[0] == "one " + "1" * 10 + "2" * 10
    assert lines[1] == "two " + " " * 19 + "x"
    assert len(lines[2]) == 4 + 20


# --- plots ---------------------------------------------------------------------------------------------------------


def plot() -> Plot:
    steps = [{"step": number} for number in range(1, 6)]
    used, limit = [0, 5, 10, 10, 2], [10, 10, 5, 5, 10]
    return Plot(steps, Series("used", used, "", "#00aa00"), Series("<limit>", limit, "", "#cc0000"), 10, "blocks")


def test_a_plot_in_characters() -> None:
    """From above: the line where it runs, below it as much as there is, in eighths of a row."""
    lines = plot().text(height=5, width=5).plain.splitlines()
    assert [line[7:] for line in lines[:5]] == ["━━██━", "  ██ ", " ▄━━ ", " ███ ", " ████"]
    assert lines[5].split() == ["step", "1", "5"]


def test_a_plot_as_svg_is_well_formed_and_needs_nothing_else() -> None:
    """It parses, its text is escaped, its paths stay within its box, it names no address."""
    text = plot().svg("a <title>")
    root = ElementTree.fromstring(text)
    assert [element.text for element in root if element.tag == "title"] == ["a <title>"]
    assert any(element.text == "<limit>" for element in root if element.tag == "text")
    assert "://" not in text
    _, _, width, height = (float(value) for value in root.attrib["viewBox"].split())
    for path in (element.attrib["d"] for element in root if element.tag == "path"):
        points = [tuple(map(float, pair)) for pair in re.findall(r"(-?[\d.]+),(-?[\d.]+)", path)]
        assert points and all(0 <= x <= width and 0 <= y <= height for x, y in points)


# --- what steps say ------------------------------------------------------------------------------------------------


def test_shares_and_preemptions() -> None:
    """Requests that ran before and after the preemption, and what had been computed."""
    steps = [
        step(3, ("A", 0, 10, True)),
        step(4, ("A", 10, 1, False), ("B", 0, 7, True)),
        step(5, ("B", 7, 1, False), left=("A",)),
        step(6, ("A", 0, 12, True)),
    ]
    assert step_facts.preemptions(steps) == [("A", 5, "recompute")]
    assert step_facts.num_computed(steps, "A", 5) == 11
    assert step_facts.num_sampled(steps, "A", before=5) == 2
    back = step_facts.next_share(steps, "A", 5)
    assert back is not None and (back[0], back[1]["tokens"]) == (6, 12)
    assert step_facts.next_share(steps, "B", 5) is None
    assert [one["step"] for one in step_facts.about(steps, ["B"])] == [4, 5]
    assert step_facts.mark_preemptions(steps[2], "A")[0] == step_facts.PREEMPTED


def test_the_threshold_of_steps() -> None:
    """R174, R175: halved once for each eviction, never below one, back to the total before the step after an end."""
    steps = [step(1, ("A", 0, 4, True)), step(2, ("B", 0, 1, False), left=("G", "H"))]
    steps += [step(number, ("A", number, 1, False)) for number in range(3, 2 + OUTPUT_TOKENS["A"])]
    steps.append(step(99, ("B", 9, 1, False)))
    values = list(thresholds_of(steps, 9))
    assert values == [9, *[2] * (len(steps) - 2), 9]
    assert list(thresholds_of([step(1, left=("A", "B", "C", "D"))], 5)) == [1]


# --- adapters ------------------------------------------------------------------------------------------------------


def test_an_adapter_is_as_peft_saves_it(tmp_path: Path) -> None:
    """Matrices of every layer in the shapes of the model's projections; other seeds, other numbers."""
    one, two = (tiny_adapters.make_adapter(default_model(), tmp_path / name, seed) for seed, name in enumerate("ab"))
    config = json.loads((one / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["target_modules"] == ["q_proj", "v_proj"]
    with safe_open(one / "adapter_model.safetensors", "np") as file:
        names = list(file.keys())
        shapes = {file.get_slice(name).get_shape()[0] for name in names if "lora_B" in name}
        assert len(names) == 4 * 2 * 2 and shapes == {256, 128}
    assert (one / "adapter_model.safetensors").read_bytes() != (two / "adapter_model.safetensors").read_bytes()


# --- checks can fail -----------------------------------------------------------------------------------------------


def skew_steps(moved: str = "", *, planned_late: bool = False) -> list[dict[str, Any]]:
    """A, B in slot 0 and C in slot 1, by turns; the request `moved` runs once in the other slot."""
    steps = []
    for number in range(1, 9):
        lane = (number - 1) % 2
        names = {"A": 0, "B": 0, "C": 1} | ({moved: int(moved != "C")} if moved and number > 6 else {})
        here = [(name, number, 1, False) for name, slot in names.items() if slot == lane]
        start = 100 * number
        finished = start + (90 if planned_late else 150)
        steps.append(step(number, *here, lane=lane, **timed(start, 1, start + 10, 60, finished)))
    return steps


@pytest.mark.parametrize(
    ("steps", "broken"),
    [
        (skew_steps(), set()),
        (skew_steps(moved="A"), {"a task stays in its slot", "a slot that decodes"}),
        (skew_steps(planned_late=True), {"two batches are in flight, one of each slot", "the next is planned while"}),
    ],
)
def test_checks_of_skew_see_what_they_are_about(steps: list[dict[str, Any]], broken: set[str]) -> None:
    """R147, R179, R183: a task that moves, and batches that wait for each other, do not pass; all else does."""
    told = {"A": [{"reason": "SLOT_TYPE", "numbers": {}}]}
    seen = Observation(steps, {name: RequestOutput(name, None, None, []) for name in "ABC"}, told)
    wrong = {check.what for check in skew.checks(seen) if not check.passed}
    assert len(wrong) == len(broken) and all(any(what.startswith(start) for what in wrong) for start in broken)
