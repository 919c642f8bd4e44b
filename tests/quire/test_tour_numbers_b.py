"""Stops of `quire tour` on real stacks: they pass, and their numbers can be computed from `quire steps --json` alone (issue 7).

What is computed here is computed from the files that `--steps` writes, by other code than the stops'.
"""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from quire.tour import route
from quire.tour.console import screen_console
from quire.tour.guide import Guide
from quire.tour.screen import HEIGHT
from quire.tour.stops.chitu import TYPES

Steps = list[dict[str, Any]]
Numbers = dict[str, int | float | str]

OTHER_SOURCES = {
    "explain": {"spans of its trace", "reasons to wait"},
    "crash": {"s from the kill to the next tokens"},
}
"""Numbers that steps do not have: from the trace, from `quire why`, and when the tour killed."""


def groups(steps: Steps, name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    return ((step, group) for step in steps for group in step["scheduled"] if group["id"] == name)


def of(steps: Steps, *wanted: str) -> Steps:
    """Steps in which one of those runs or leaves."""
    found = set(wanted)
    return [
        step
        for step in steps
        if found & ({group["id"] for group in step["scheduled"]} | {name for name, _ in step["preempted"]})
    ]


def prompts(steps: Steps) -> Steps:
    return [step for step in steps if any(group["prefill"] for group in step["scheduled"])]


def leaves(steps: Steps, first_letter: str, mode: str) -> list[tuple[dict[str, Any], str]]:
    """(step, who) of those that left in that way, of requests that begin with the letter."""
    return [
        (step, name)
        for step in steps
        for name, how in step["preempted"]
        if how == mode and name[0] == first_letter and len(name) == 2
    ]


# --- by stop -------------------------------------------------------------------------------------------------------


def preempt(steps: Steps) -> Numbers:
    recomputed, swapped = leaves(steps, "r", "recompute"), leaves(steps, "s", "swap")
    lost = again = 0
    for step, name in recomputed:
        before = [group for at, group in groups(steps, name) if at["step"] < step["step"]][-1]
        after = next(group for at, group in groups(steps, name) if at["step"] > step["step"])
        lost += before["computed_before"] + before["tokens"]
        again += after["tokens"]
    own = of(steps, "sA", "sB", "sC", "sD")
    return {
        "recompute: times somebody left": len(recomputed),
        "recompute: tokens lost": lost,
        "recompute: tokens computed again": again,
        "by number: one alone, recomputed": len(leaves(steps, "n", "recompute")),
        "swap: times somebody left": len(swapped),
        "swap: blocks copied out": sum(len(step["swap_out"]) for step in own),
        "swap: blocks copied in": sum(len(step["swap_in"]) for step in own),
        "by number: two samples, swapped": len(leaves(steps, "n", "swap")),
    }


def policy_v0(steps: Steps) -> Numbers:
    first = {group["id"]: step["step"] for step in reversed(steps) for group in step["scheduled"]}
    pushed = [step["step"] for step in steps for name, _ in step["preempted"] if name.startswith("low-")]
    planned = {step["step"]: step["times"]["planned_ns"] for step in steps}
    after = min(number for number in planned if number > first["1st"])
    batches = [{group["id"] for group in step["scheduled"]} & {"a", "b", "c"} for step in steps]
    return {
        "priority: requests pushed out": len(pushed),
        "priority: steps until it starts": first["high"] - pushed[0],
        "delay: s that the 1st prompt took": (planned[after] - planned[first["1st"]]) / 1e9,
        "delay: steps until the 2nd starts": first["2nd"] - first["1st"],
        "ignored: steps that `huge` is in": len(of(steps, "huge")),
        "ignored: steps until `next` starts": first["next"] - first["first"],
        "adapters: most in one step": max(len(batch) for batch in batches),
        "adapters: steps from d's start to c's": first["c"] - first["d"],
    }


def chitu(steps: Steps) -> Numbers:
    orders = dict.fromkeys(TYPES, "")
    for step in prompts(steps):
        number, letter = step["scheduled"][0]["id"][0], step["scheduled"][0]["id"][1:]
        orders[TYPES[int(number)]] += letter if len(letter) == 1 else ""
    return dict(orders)


def chitu_threshold(steps: Steps) -> Numbers:
    total = 26
    asked = {name: 30 + 3 * place for place, name in enumerate("ABCDEFGH")}
    threshold, lows, halved, rises = total, [total], total, 0
    made = dict.fromkeys(asked, 0)
    for step in steps:
        for _ in step["preempted"]:
            threshold = halved = max(1, threshold // 2)
        lows.append(threshold)
        ended = False
        for name, wanted in asked.items():
            new = len(step["sampled"].get(f"{name}/0", []))
            made[name] += new
            ended |= bool(new) and made[name] == wanted
        if ended and threshold < total:
            threshold, rises = total, rises + 1
    return {
        "steps": len(steps),
        "evictions": sum(len(step["preempted"]) for step in steps),
        "lowest threshold, blocks": min(lows),
        "times it came back to the total": rises,
        "most blocks in use": max(total - step["free"][0] for step in steps),
        "threshold after the last eviction": halved,
    }


def most_under_way(steps: Steps) -> int:
    """Of steps planned before, those whose results come after: counted at each planning."""
    times = [(step["times"]["planned_ns"], step["times"]["finished_ns"]) for step in steps]
    return max(sum(start <= at < end for start, end in times) for at, _ in times)


def skew(steps: Steps) -> Numbers:
    slots = [[step for step in steps if step["lane"] == slot] for slot in (0, 1)]
    last = min(slot[-1]["step"] for slot in slots)
    both = [step["times"] for step in steps if step["step"] <= last]
    return {
        "steps of slot 0": len(slots[0]),
        "steps of slot 1": len(slots[1]),
        "most residents of slot 0": max(len(step["scheduled"]) for step in slots[0]),
        "most residents of slot 1": max(len(step["scheduled"]) for step in slots[1]),
        "most steps under way at once": most_under_way(steps),
        "planned while the other ran": sum(
            both[i]["planned_ns"] < both[i - 1]["finished_ns"] for i in range(1, len(both))
        ),
    }


def dp(steps: Steps) -> Numbers:
    rounds: dict[int, Steps] = {}
    for step in steps:
        rounds.setdefault(step["times"]["planned_ns"], []).append(step)
    with_prompts = [planned for planned in rounds.values() if prompts(planned)]
    return {
        "rounds": len(rounds),
        "steps of rank 0": sum(step["lane"] == 0 for step in steps),
        "steps of rank 1": sum(step["lane"] == 1 for step in steps),
        "rounds of prompts": len(with_prompts),
        "of these with an idle rank": sum(len(planned) == 1 for planned in with_prompts),
        "most tasks of a rank in a step": max(len(step["scheduled"]) for step in steps),
    }


def overlap(without: Steps, with_overlap: Steps) -> Numbers:
    numbers: Numbers = {}
    for option, steps in (("no overlap", without), ("overlap", with_overlap)):
        full = [step for step in steps if len(step["scheduled"]) == 6 and not prompts([step])]
        times = [step["times"] for step in full]
        parts = ("cache_ns", "prepare_ns", "model_ns", "sample_ns")
        runs = [(t["started_ns"], t["started_ns"] + sum(t[part] for part in parts)) for t in times]
        gaps = [max(0, runs[i][0] - runs[i - 1][1]) for i in range(1, len(runs))]
        numbers |= {
            f"{option}: decoding steps": len(full),
            f"{option}: worker's idle share": sum(gaps) / (runs[-1][1] - runs[0][0]),
            f"{option}: median gap, µs": median(gaps) / 1e3,
            f"{option}: planned ahead": sum(
                times[i]["planned_ns"] < times[i - 1]["finished_ns"] for i in range(1, len(times))
            ),
        }
    return numbers


def explain(steps: Steps) -> Numbers:
    own = list(groups(steps, "T"))
    left = [step["step"] for step in steps for name, _ in step["preempted"] if name == "T"]
    lost = [[group for step, group in own if step["step"] < at][-1] for at in left]
    return {
        "first step that it ran in": own[0][0]["step"],
        "pieces that it was computed in": sum(group["prefill"] for _, group in own),
        "tokens lost when it had to leave": sum(group["computed_before"] + group["tokens"] for group in lost),
        "times it had to leave": len(left),
    }


def crash(steps: Steps) -> Numbers:
    own = of(steps, *(f"s{number}" for number in range(6)))
    lost = [i for i, step in enumerate(own) if step.get("error")]
    after = own[lost[-1] + 1 :] if lost else own
    return {
        "steps in all": len(own),
        "steps of the new worker": len(after),
        "tokens computed again": sum(g["tokens"] for step in after for g in step["scheduled"] if g["prefill"]),
        "tokens of the streams": sum(len(t) for step in own for t in step["sampled"].values()),
        "steps that were lost on the way": len(lost),
    }


STOPS: dict[str, Callable[..., Numbers]] = {
    "preempt": preempt,
    "policy-v0": policy_v0,
    "chitu": chitu,
    "chitu-threshold": chitu_threshold,
    "skew": skew,
    "dp": dp,
    "overlap": overlap,
    "explain": explain,
    "crash": crash,
}


@pytest.mark.long
@pytest.mark.parametrize("name", STOPS)
def test_numbers_are_those_of_the_steps(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The stop passes, fits its page, and each of its numbers is what `quire steps --json` gives.

    v0: R47, R50, R53, R57, R60, R73, R76, R77, R82, R85. Overlap: R147, R159. Chitu: R168-R170, R173-R175, R179, R183, R184,
    R188-R190, R194. Every stop: R200.
    """
    printed = io.StringIO()
    [visit] = Guide(screen_console(printed), steps_folder=tmp_path).lead(route.chosen([name]))
    assert visit.passed and visit.screen is not None, f"{visit.verdict}\n{printed.getvalue()}"
    files = [tmp_path / f"{name}.json", *sorted(tmp_path.glob(f"{name}-[0-9].json"))]
    stacks = [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files]
    read = {number.what: number.value for number in visit.screen.numbers}
    assert read.keys() >= OTHER_SOURCES.get(name, set())
    from_steps = {what: value for what, value in read.items() if what not in OTHER_SOURCES.get(name, set())}
    expected = STOPS[name](*stacks)
    exact = {what: value for what, value in expected.items() if not isinstance(value, float)}
    assert {what: value for what, value in from_steps.items() if what in exact} == exact
    for what in expected.keys() - exact.keys():
        assert from_steps[what] == pytest.approx(expected[what], rel=1e-6), what
    assert from_steps.keys() == expected.keys()
    assert printed.getvalue().count("\n") <= HEIGHT, "the screen is longer than a page"
    record_property("size", f"{name}: {len(from_steps)} numbers from {sum(map(len, stacks))} steps")
