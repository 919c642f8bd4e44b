"""The stop `phases`: steps of prompts or of decodes (vLLM v0) against steps that mix both (vLLM v1)."""

from collections.abc import Sequence

from quire.client.sampling_params import SamplingParams
from quire_tools.tour import pictures
from quire_tools.tour.pictures import Step, share
from quire_tools.tour.screen import Check, Number, Screen, Stop
from quire_tools.tour.stage import GATE, Stage, TourRequest

_PROMPTS = {"R1": 3, "R2": 5, "R3": 12}
_OUTPUT_TOKENS = 9
BUDGET = 11
"""Tokens per step under v1: ten, plus one for the request that decodes throughout."""
_NAMES = (GATE, *_PROMPTS)


def show(stage: Stage) -> Screen:
    """Three prompts arrive while one request decodes, under both policies."""
    v0 = _course(stage, "vllm-v0", None)
    v1 = _course(stage, "vllm-v1", BUDGET)
    cell = pictures.token_cell(3)
    return Screen(
        "Phases: all prompts or all decodes, against one budget for both",
        STOP.requirements,
        [
            f"Prompts of 3, 5 and 12 tokens come while {GATE} decodes. Under v0 a step is all prompts or all decodes, and decodes "
            f"wait; under v1 a step has {BUDGET} tokens for whoever has tokens to compute, and a long prompt comes in chunks.",
            "vllm-v0: tokens computed in each step",
            pictures.timetable(v0, _NAMES, cell, width=3),
            "vllm-v1: tokens computed in each step",
            pictures.timetable(v1, _NAMES, cell, width=3),
            pictures.legend(
                (" n ", f"black on {pictures.PREFILL_STYLE}", "of a prompt"),
                (" 1 ", f"black on {pictures.DECODE_STYLE}", "a decode"),
                (pictures.IDLE, pictures.IDLE_STYLE, "no part in the step"),
            ),
        ],
        _checks(v0, v1),
        _numbers(v0, v1),
    )


def _course(stage: Stage, policy: str, budget: int | None) -> list[Step]:
    """Run the requests and return the steps of interest. Prefix caching is off, so that everything is computed."""
    with stage.stack(
        policy=policy,
        max_num_batched_tokens=budget,
        max_num_seqs=None if budget is None else budget,
        scheduler_args=("--no-overlap", "--no-enable-prefix-caching"),
    ) as stack:
        params = SamplingParams(max_tokens=_OUTPUT_TOKENS, ignore_eos=True, temperature=0.0)
        prompts = [
            TourRequest(name, [600 + 20 * number + place for place in range(length)], params)
            for number, (name, length) in enumerate(_PROMPTS.items())
        ]
        stack.at_once(prompts, gate_stays=True)
        return course_of(stack.steps())


def course_of(steps: Sequence[Step]) -> list[Step]:
    """From two steps before the first prompt to the last step with one of the requests."""
    places = [place for place, step in enumerate(steps) if any(share(step, name) for name in _PROMPTS)]
    return list(steps[max(0, places[0] - 2) : places[-1] + 1])


def kinds(step: Step) -> set[bool]:
    """Kinds of work in a step: True = prompts, False = decodes."""
    return {group["prefill"] for group in step["scheduled"]}


def tokens(step: Step) -> dict[str, int]:
    """Number of tokens of each request."""
    return {group["id"]: group["tokens"] for group in step["scheduled"]}


def _first(steps: Sequence[Step]) -> int:
    """Index of the first step with a prompt."""
    return next(place for place, step in enumerate(steps) if any(share(step, name) for name in _PROMPTS))


def _numbers(v0: Sequence[Step], v1: Sequence[Step]) -> list[Number]:
    return [
        number
        for name, steps in (("v0", v0), ("v1", v1))
        for number in (
            Number(f"{name}: steps that mix both", sum(len(kinds(step)) == 2 for step in steps), "R41"),
            Number(f"{name}: steps in which {GATE} paused", sum(GATE not in tokens(step) for step in steps), "R40"),
            Number(f"{name}: most tokens of a step", max(sum(tokens(step).values()) for step in steps), "R128"),
            Number(f"{name}: steps until R3 has its prompt", _prompt_steps(steps), "R128"),
        )
    ]


def _prompt_steps(steps: Sequence[Step]) -> int:
    """Steps from the first one with a prompt to the one that completes the longest prompt."""
    last = max(place for place, step in enumerate(steps) if (group := share(step, "R3")) and group["prefill"])
    return last - _first(steps) + 1


def _checks(v0: Sequence[Step], v1: Sequence[Step]) -> list[Check]:
    start = _first(v1)
    shares = [{name: count for name, count in tokens(step).items() if name != GATE} for step in v1[start : start + 3]]
    prompt_steps = [step for step in v0[_first(v0) :] if kinds(step) == {True}]
    most = max(sum(tokens(step).values()) for step in v1)
    return [
        Check(
            "v0: a step is all prompts or all decodes",
            all(len(kinds(step)) == 1 for step in v0),
            f"{sum(kinds(step) == {True} for step in v0)} of prompts, {sum(kinds(step) == {False} for step in v0)} of decodes",
        ),
        Check(
            "v0: decodes wait while prompts are computed",
            bool(prompt_steps) and all(GATE not in tokens(step) for step in prompt_steps),
            f"{GATE} has no part in step {', '.join(str(step['step']) for step in prompt_steps)}",
        ),
        Check(
            "v1: budget 10 goes 3, 5, 2, then 1, 1, 8, then 1, 1, 2",
            shares == _EXPECTED,
            "; ".join(", ".join(f"{name} {count}" for name, count in each.items()) for each in shares),
        ),
        Check("v1: no step is over its budget", most <= BUDGET, f"at most {most} of {BUDGET}"),
        Check(
            "v1: the decode never pauses",
            all(GATE in tokens(step) for step in v1),
            f"{GATE} has a token in each of {len(v1)} steps",
        ),
    ]


_EXPECTED = [{"R1": 3, "R2": 5, "R3": 2}, {"R1": 1, "R2": 1, "R3": 8}, {"R1": 1, "R2": 1, "R3": 2}]
"""Tokens per request in the first three steps under v1: at most 10 a step, R3 in three chunks."""

STOP = Stop(
    "phases",
    "Steps of vLLM v0, all prompts or all decodes, against mixed and chunked steps of v1.",
    ("R40", "R41", "R127", "R128"),
    show,
)
