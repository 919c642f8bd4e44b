"""The stop `phases`: steps of prompts or of decodes (vLLM v0) against steps that mix both (vLLM v1)."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import RenderableType

from quire_tools.tour import pictures
from quire_tools.tour.pictures import Step, share
from quire_tools.tour.scenario import request
from quire_tools.tour.screen import Check, Number, declared
from quire_tools.tour.stage import GATE, Stage

_PROMPTS = {"A": 3, "B": 5, "C": 12}
_BUDGET = 11
"""Tokens per step under v1: ten, plus one for the request that decodes throughout."""
_LIMITS: dict[str, dict[str, Any]] = {"v0": {}, "v1": {"max_num_batched_tokens": _BUDGET, "max_num_seqs": _BUDGET}}
_EXPECTED = [{"A": 3, "B": 5, "C": 2}, {"A": 1, "B": 1, "C": 8}, {"A": 1, "B": 1, "C": 2}]
"""Tokens per request in the first three steps under v1: at most 10 a step, C in three chunks."""
Steps = Sequence[Step]


def _observe(stage: Stage) -> dict[str, Steps]:
    """Steps by policy. Prefix caching is off, so that everything is computed."""
    return {name: _run(stage, name) for name in _LIMITS}


def _run(stage: Stage, name: str) -> Steps:
    """From two steps before the first prompt to the last step with one of the requests."""
    args = ("--no-overlap", "--no-enable-prefix-caching")
    with stage.stack(policy=f"vllm-{name}", scheduler_args=args, **_LIMITS[name]) as stack:
        stack.at_once([request(prompt, length, 9) for prompt, length in _PROMPTS.items()], gate_stays=True)
        steps = stack.steps()
    places = [place for place, step in enumerate(steps) if any(share(step, prompt) for prompt in _PROMPTS)]
    return steps[max(0, places[0] - 2) : places[-1] + 1]


def _kinds(step: Step) -> set[bool]:
    """Kinds of work in a step: True = prompts, False = decodes."""
    return {group["prefill"] for group in step["scheduled"]}


def _tokens(step: Step) -> dict[str, int]:
    """Number of tokens of each request."""
    return {group["id"]: group["tokens"] for group in step["scheduled"]}


def _first(steps: Steps) -> int:
    """Index of the first step with a prompt."""
    return next(place for place, step in enumerate(steps) if any(share(step, name) for name in _PROMPTS))


def _picture(runs: Mapping[str, Steps]) -> Iterator[RenderableType]:
    draw = partial(pictures.timetable, names=(GATE, *_PROMPTS), cell=pictures.token_cell(3), width=3)
    for name, steps in runs.items():
        yield f"vllm-{name}: tokens computed in each step"
        yield draw(steps)
    yield pictures.legend(
        (" n ", f"black on {pictures.PREFILL_STYLE}", "of a prompt"),
        (" 1 ", f"black on {pictures.DECODE_STYLE}", "a decode"),
        (pictures.IDLE, pictures.IDLE_STYLE, "not in the step"),
    )


def _numbers(runs: Mapping[str, Steps]) -> list[Number]:
    return [
        number
        for name, steps in runs.items()
        for number in (
            Number(f"{name}: steps that mix both", sum(len(_kinds(step)) == 2 for step in steps)),
            Number(f"{name}: steps in which {GATE} paused", sum(GATE not in _tokens(step) for step in steps)),
            Number(f"{name}: most tokens of a step", _most(steps)),
            Number(f"{name}: steps until C has its prompt", _prompt_steps(steps)),
        )
    ]


def _most(steps: Steps) -> int:
    return max(sum(_tokens(step).values()) for step in steps)


def _prompt_steps(steps: Steps) -> int:
    """Steps from the first one with a prompt to the one that completes the longest prompt."""
    last = max(place for place, step in enumerate(steps) if (group := share(step, "C")) and group["prefill"])
    return last - _first(steps) + 1


def _checks(runs: Mapping[str, Steps]) -> list[Check]:
    v0, v1 = runs["v0"], runs["v1"]
    start = _first(v1)
    shares = [{name: count for name, count in _tokens(step).items() if name != GATE} for step in v1[start : start + 3]]
    prompts, decodes = ([step for step in v0 if _kinds(step) == {kind}] for kind in (True, False))
    waits = [step for step in v0[_first(v0) :] if step in prompts]
    return [
        Check(
            "v0: a step is all prompts or all decodes",
            len(prompts) + len(decodes) == len(v0),
            f"{len(prompts)} of prompts, {len(decodes)} of decodes",
        ),
        Check(
            "v0: decodes wait while prompts are computed",
            bool(waits) and all(GATE not in _tokens(step) for step in waits),
            f"{GATE} is not in step {', '.join(str(step['step']) for step in waits)}",
        ),
        Check(
            "v1: budget 10 goes 3, 5, 2, then 1, 1, 8, then 1, 1, 2",
            shares == _EXPECTED,
            "; ".join(", ".join(f"{name} {count}" for name, count in each.items()) for each in shares),
        ),
        Check("v1: no step is over its budget", _most(v1) <= _BUDGET, f"at most {_most(v1)} of {_BUDGET}"),
        Check(
            "v1: the decode never pauses",
            all(GATE in _tokens(step) for step in v1),
            f"{GATE} has a token in each of {len(v1)} steps",
        ),
    ]


STOP = declared(
    "phases",
    "Steps of vLLM v0, all prompts or all decodes, against mixed and chunked steps of v1.",
    "docs/policies.md#presets",
    title="Phases: all prompts or all decodes, against one budget for both",
    text=f"Prompts of 3, 5 and 12 tokens arrive while {GATE} decodes. Under v0 a step is all prompts or all decodes, and decodes "
    f"wait; under v1 a step has {_BUDGET} tokens for every request with tokens to compute, and a long prompt comes in chunks.",
    observe=_observe,
    picture=_picture,
    checks=_checks,
    numbers=_numbers,
)
