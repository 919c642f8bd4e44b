"""Numbers of the stops about policies, order and faults: `preempt`, `policy-v0`, `chitu`, `chitu-threshold`, `skew`, `dp`,
`overlap`, `explain`, `crash`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from quire_tools.tour.stops.chitu import TYPES

Steps = Sequence[Mapping[str, Any]]
Numbers = dict[str, int | float | str]


def groups(steps: Steps, name: str) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    return ((step, group) for step in steps for group in step["scheduled"] if group["id"] == name)


def of(steps: Steps, *wanted: str) -> list[Mapping[str, Any]]:
    """Steps in which one of those runs or leaves."""
    found = set(wanted)
    return [
        step
        for step in steps
        if found & ({group["id"] for group in step["scheduled"]} | {name for name, _ in step["preempted"]})
    ]


def prompts(steps: Steps) -> list[Mapping[str, Any]]:
    return [step for step in steps if any(group["prefill"] for group in step["scheduled"])]


def leaves(steps: Steps, first_letter: str, mode: str) -> list[tuple[Mapping[str, Any], str]]:
    """(step, request) of those that were preempted in that way, of requests that begin with the letter."""
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
        "recompute: preemptions": len(recomputed),
        "recompute: tokens lost": lost,
        "recompute: tokens computed again": again,
        "by number: one sample, recomputed": len(leaves(steps, "n", "recompute")),
        "swap: preemptions": len(swapped),
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
        "priority: requests preempted": len(pushed),
        "priority: steps until it starts": first["high"] - pushed[0],
        "delay: s that the 1st prompt took": (planned[after] - planned[first["1st"]]) / 1e9,
        "delay: steps until the 2nd starts": first["2nd"] - first["1st"],
        "ignored: steps that `huge` is in": len(of(steps, "huge")),
        "ignored: steps until `next` starts": first["next"] - first["first"],
        "adapters: most in one step": max(len(batch) for batch in batches),
        "adapters: steps from d to c": first["c"] - first["d"],
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
        "times restored to the total": rises,
        "most blocks in use": max(total - step["free"][0] for step in steps),
        "threshold after the last eviction": halved,
    }


def most_in_flight(steps: Steps) -> int:
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
        "most steps in flight at once": most_in_flight(steps),
        "planned while the other ran": sum(
            both[i]["planned_ns"] < both[i - 1]["finished_ns"] for i in range(1, len(both))
        ),
    }


def dp(steps: Steps) -> Numbers:
    rounds: dict[int, list[Mapping[str, Any]]] = {}
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


def overlap(*runs: Steps) -> Numbers:
    numbers: Numbers = {}
    for option, steps in zip(("planned", "grants", "overlap"), runs, strict=True):
        full = [step for step in steps if len(step["scheduled"]) == 6 and not prompts([step])]
        times = [step["times"] for step in full]
        parts = ("cache_ns", "prepare_ns", "model_ns", "sample_ns")
        runs = [(t["started_ns"], t["started_ns"] + sum(t[part] for part in parts)) for t in times]
        gaps = [max(0, runs[i][0] - runs[i - 1][1]) for i in range(1, len(runs))]
        numbers |= {
            f"{option}: decoding steps": len(full),
            f"{option}: worker's idle share": sum(gaps) / (runs[-1][1] - runs[0][0]),
            f"{option}: median gap, µs": median(gaps) / 1e3,
            f"{option}: repeated by a grant": sum("is_repeat" in step for step in full),
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
        "prefill chunks": sum(group["prefill"] for _, group in own),
        "tokens lost by preemption": sum(group["computed_before"] + group["tokens"] for group in lost),
        "preemptions": len(left),
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
        "steps lost in flight": len(lost),
    }


def printed_as(recompute: Callable[..., Numbers]) -> Callable[[Sequence[Steps], Mapping[str, str]], dict[str, str]]:
    """The numbers as a screen prints them: others than whole ones with up to four digits."""

    def texts(files: Sequence[Steps], _printed: Mapping[str, str]) -> dict[str, str]:
        numbers = recompute(*files)
        return {what: f"{value:.4g}" if isinstance(value, float) else str(value) for what, value in numbers.items()}

    return texts


RECOMPUTED = {
    name: printed_as(recompute)
    for name, recompute in {
        "preempt": preempt,
        "policy-v0": policy_v0,
        "chitu": chitu,
        "chitu-threshold": chitu_threshold,
        "skew": skew,
        "dp": dp,
        "overlap": overlap,
        "explain": explain,
        "crash": crash,
    }.items()
}
