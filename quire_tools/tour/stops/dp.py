"""The stop `dp`: two workers as data-parallel ranks; tasks are placed round robin, or where their prefix is cached."""

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from quire_tools.tour import arrivals, pictures, step_facts
from quire_tools.tour.pictures import Step
from quire_tools.tour.scenario import Observation, observed, request, tiny_worker
from quire_tools.tour.screen import Check, Number, declared
from quire_tools.tour.stage import Stage, TourRequest

_NUM_RANKS, _MAX_REQS = 2, 6
_NEW = "ABCDEFG"
"""Tasks with uncached prompts; the first six get a place."""
_KNOWN = {"b": "B", "d": "D", "c": "C"}
"""Tasks with the same prefix as those, in order of arrival."""
_PROMPT_TOKENS, _BLOCK_SIZE = 48, 16
_OPTIONS: dict[str, Any] = {
    "policy": "chitu-dp",
    "workers": _NUM_RANKS,
    "policy_set": (f"max_reqs={_MAX_REQS}", "prefix_caching=true"),
    "worker_args": tiny_worker(256, 64),
}


def _observe(stage: Stage) -> Observation:
    """Seven tasks with new prefixes, then three that share a prefix with one of them."""
    new = [request(name, _PROMPT_TOKENS, 8 + 3 * place) for place, name in enumerate(_NEW)]
    known = [
        TourRequest(name, [*request(like, _PROMPT_TOKENS, 6).prompt, 7, 8, 9], request(name, 0, 6).params)
        for name, like in _KNOWN.items()
    ]
    with stage.stack(**_OPTIONS) as stack:
        outputs = [output for requests in (new, known) for output in arrivals.one_by_one(stack, requests)]
        return observed(stack, outputs, why=True)


def _rounds(seen: Observation) -> list[list[Step]]:
    """Steps grouped by the call that planned them: a round is planned for all ranks at once."""
    found: dict[int, list[Step]] = {}
    for step in seen.steps:
        found.setdefault(step["times"]["planned_ns"], []).append(step)
    return list(found.values())


def _prompt_rounds(seen: Observation) -> list[list[Step]]:
    return [planned for planned in _rounds(seen) if any(map(step_facts.is_prefill, planned))]


def _num_idle(seen: Observation) -> int:
    """Rounds of prompts in which a rank has no step."""
    return sum(len(planned) < _NUM_RANKS for planned in _prompt_rounds(seen))


def _most_tasks(seen: Observation) -> int:
    return max(len(step_facts.ids(step)) for step in seen.steps)


def _ranks(seen: Observation, name: str) -> str:
    return ",".join(map(str, seen.lanes_of(name)))


def _draw(seen: Observation, name: str) -> dict[str, Any]:
    """Numbers of PREFIX_AFFINITY of a task that was placed by its prefix."""
    return dict(next(iter(seen.told(name, "PREFIX_AFFINITY")), {}))


def _picture(seen: Observation) -> Iterator[RenderableType]:
    """A timetable for each rank with a cell for each round, so that pauses are visible; and how tasks were placed."""
    for rank in range(_NUM_RANKS):
        yield Text(f"rank {rank}: rounds", style="bold")
        own = [_of_rank(planned, rank) for planned in _rounds(seen)]
        yield pictures.timetable(
            step_facts.fitting(own, 90), [name for name in seen.names if seen.lanes_of(name) == [rank]]
        )
    yield pictures.legend(*pictures.TIMETABLE_LEGEND)
    yield pictures.table(
        ("task", "prefix of", "which ran on rank", "goes to rank", "which has", "found in the cache"),
        [
            (
                *(name, like, _ranks(seen, like), _ranks(seen, name)),
                *(f"{_draw(seen, name).get('known', 0)} tokens", f"{seen.outputs[name].num_cached_tokens} tokens"),
            )
            for name, like in _KNOWN.items()
        ],
    )


def _of_rank(planned: list[Step], rank: int) -> Step:
    """The rank's step of a round; if it has none, an empty step with the round's first number."""
    idle = {"step": planned[0]["step"], "lane": rank, "scheduled": [], "preempted": []}
    return next((step for step in planned if step["lane"] == rank), idle)


def _numbers(seen: Observation) -> list[Number]:
    return [
        Number("rounds", len(_rounds(seen))),
        Number("steps of rank 0", len(seen.of_lane(0))),
        Number("steps of rank 1", len(seen.of_lane(1))),
        Number("rounds of prompts", len(_prompt_rounds(seen))),
        Number("of these with an idle rank", _num_idle(seen)),
        Number("most tasks of a rank in a step", _most_tasks(seen)),
    ]


def _checks(seen: Observation) -> list[Check]:
    first, most = _NEW[:_MAX_REQS], _most_tasks(seen)
    prompts = _prompt_rounds(seen)
    mixed = [planned for planned in prompts if not all(map(step_facts.is_prefill, planned))]
    return [
        Check(
            "new tasks are placed on the ranks in turn",
            [seen.lanes_of(name) for name in first] == [[place % _NUM_RANKS] for place in range(len(first))],
            " ".join(f"{name}:{_ranks(seen, name)}" for name in first),
        ),
        Check("each stays at its rank", all(len(seen.lanes_of(name)) == 1 for name in seen.names), "until its end"),
        Check("no rank has more than its places", 1 < most <= _MAX_REQS // _NUM_RANKS, f"at most {most}"),
        Check(
            "while any rank has prompts, none decodes",
            not mixed and _num_idle(seen) > 0,
            f"{len(prompts)} rounds of prompts, in {_num_idle(seen)} a rank was idle",
        ),
        Check("a task with a cached prefix goes to its rank", *_drawn(seen)),
        Check("the rank's cached prefix is not computed again", *_reused(seen)),
    ]


def _drawn(seen: Observation) -> tuple[bool, str]:
    ranks = {name: seen.lanes_of(name) for name in _KNOWN}
    right = all(ranks[name] == seen.lanes_of(like) for name, like in _KNOWN.items())
    told = all(_draw(seen, name).get("rank") == ranks[name][0] for name in _KNOWN)
    several = len({rank for found in ranks.values() for rank in found}) > 1
    return right and told and several, " ".join(f"{name}:{_ranks(seen, name)}" for name in _KNOWN)


def _reused(seen: Observation) -> tuple[bool, str]:
    """Check that the whole blocks of the known prompt are cached tokens of the response and of the first step."""
    found = [seen.outputs[name].num_cached_tokens for name in _KNOWN]
    before = [next(step_facts.shares(seen.steps, name))[1]["computed_before"] for name in _KNOWN]
    expected = [_PROMPT_TOKENS // _BLOCK_SIZE * _BLOCK_SIZE] * len(_KNOWN)
    return found == before == expected, f"{found} tokens cached, computed from token {before[0]} on"


STOP = declared(
    "dp",
    "Data-parallel ranks: where tasks are placed, and that they stay.",
    "docs/policies.md#chitu",
    title="Data-parallel ranks: round robin, sticky, or by cached prefix",
    text=f"{_NUM_RANKS} workers with a cache each, {_MAX_REQS} places. Ranks take turns for new tasks, and a task stays at its "
    "rank; a task with a prefix cached at a rank goes there.",
    observe=_observe,
    picture=_picture,
    checks=_checks,
    numbers=_numbers,
)
