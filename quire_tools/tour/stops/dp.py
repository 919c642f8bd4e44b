"""The stop `dp`: two workers as data-parallel ranks; tasks are placed round robin, or where their prefix is cached."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from quire.client.outputs import RequestOutput
from quire.client.sampling_params import SamplingParams
from quire_tools.tour import arrivals, pictures, step_facts
from quire_tools.tour.pictures import Step
from quire_tools.tour.screen import Check, Number, Screen, Stop
from quire_tools.tour.stage import Stage, TourRequest

NUM_RANKS, MAX_REQS = 2, 6
STRANGERS = "ABCDEFG"
"""Tasks with uncached prompts; the first six get a place."""
FRIENDS = {"b": "B", "d": "D", "c": "C"}
"""Tasks with the same prefix as those, in order of arrival."""
_PROMPT_TOKENS, BLOCK_SIZE = 48, 16
_OPTIONS: dict[str, Any] = {
    "policy": "chitu-dp",
    "workers": NUM_RANKS,
    "policy_set": (f"max_reqs={MAX_REQS}", "prefix_caching=true"),
    "worker_args": ("--dtype", "float32", "--max-model-len", "256", "--num-gpu-blocks-override", "64"),
}


@dataclass(frozen=True, slots=True)
class Course:
    """All steps; a round is planned for all ranks at once. `draws`: numbers of PREFIX_AFFINITY for tasks placed by prefix."""

    steps: Sequence[Step]
    outputs: Mapping[str, RequestOutput]
    draws: Mapping[str, Mapping[str, Any]]

    @property
    def owners(self) -> dict[str, list[int]]:
        """Ranks that each task ran on."""
        return {
            name: sorted({step["lane"] for step in self.steps if pictures.share(step, name) is not None})
            for name in (*STRANGERS, *FRIENDS)
        }

    @property
    def rounds(self) -> list[list[Step]]:
        """Steps grouped by the call that planned them."""
        found: dict[int, list[Step]] = {}
        for step in self.steps:
            found.setdefault(step["times"]["planned_ns"], []).append(step)
        return list(found.values())


def show(stage: Stage) -> Screen:
    """Seven tasks with new prefixes, then three that share a prefix with one of them."""
    with stage.stack(**_OPTIONS) as stack:
        strangers = [TourRequest(name, _prompt(name), _params(8 + 3 * place)) for place, name in enumerate(STRANGERS)]
        friends = [TourRequest(name, [*_prompt(known), 7, 8, 9], _params(6)) for name, known in FRIENDS.items()]
        outputs = [*arrivals.one_by_one(stack, strangers), *arrivals.one_by_one(stack, friends)]
        names = [request.id for request in (*strangers, *friends)]
        steps = step_facts.about(stack.steps(), names)
        draws = {name: _draw(stack.why(name)["episodes"]) for name in FRIENDS}
    course = Course(steps, dict(zip(names, outputs, strict=True)), draws)
    return Screen(
        "Data-parallel ranks: round robin, sticky, drawn by what a rank knows",
        ("R188", "R189", "R190", "R193", "R194"),
        [
            f"{NUM_RANKS} workers with a cache each, {MAX_REQS} places. A task goes to the rank whose turn it is and stays; one "
            "whose prefix a rank knows goes there.",
            *(part for rank in range(NUM_RANKS) for part in _rank_picture(course, rank)),
            pictures.legend(*pictures.TIMETABLE_LEGEND),
            _draw_table(course),
        ],
        _checks(course),
        _numbers(course),
    )


def _prompt(name: str) -> list[int]:
    return [100 + 60 * ord(name) % 2_000 + place for place in range(_PROMPT_TOKENS)]


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _draw(episodes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return next((episode["numbers"] for episode in episodes if episode["reason"] == "PREFIX_AFFINITY"), {})


# --- what is shown -------------------------------------------------------------------------------------------------


def _rank_picture(course: Course, rank: int) -> tuple[Text, Text]:
    """A timetable of one rank with a cell for each round, so that pauses are visible."""
    names = [name for name, owners in course.owners.items() if owners == [rank]]
    own = [_of_rank(planned, rank) for planned in course.rounds]
    return Text(f"rank {rank}: rounds", style="bold"), pictures.timetable(step_facts.fitting(own, 90), names)


def _of_rank(planned: Sequence[Step], rank: int) -> Step:
    """The rank's step of a round; if it has none, an empty step with the round's first number."""
    idle = {"step": planned[0]["step"], "lane": rank, "scheduled": [], "preempted": []}
    return next((step for step in planned if step["lane"] == rank), idle)


def _draw_table(course: Course) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("task", "begins as", "which ran on rank", "goes to rank", "that knows", "found in the cache"):
        table.add_column(name, no_wrap=True)
    for name, known in FRIENDS.items():
        told = course.draws[name]
        tokens = f"{told.get('known', 0)} tokens"
        cached = f"{course.outputs[name].num_cached_tokens} tokens"
        table.add_row(name, known, _ranks(course, known), _ranks(course, name), tokens, cached)
    return table


def _ranks(course: Course, name: str) -> str:
    return ",".join(map(str, course.owners[name]))


def _numbers(course: Course) -> list[Number]:
    per_rank = [[step for step in course.steps if step["lane"] == rank] for rank in range(NUM_RANKS)]
    return [
        Number("rounds", len(course.rounds), "R194"),
        Number("steps of rank 0", len(per_rank[0]), "R194"),
        Number("steps of rank 1", len(per_rank[1]), "R194"),
        Number("rounds of prompts", len(_prompt_rounds(course)), "R189"),
        Number("of these with an idle rank", _num_idling(course), "R189"),
        Number("most tasks of a rank in a step", max(len(step_facts.ids(step)) for step in course.steps), "R188"),
    ]


def _prompt_rounds(course: Course) -> list[list[Step]]:
    return [planned for planned in course.rounds if any(step_facts.is_prefill(step) for step in planned)]


def _num_idling(course: Course) -> int:
    return sum(len(planned) < NUM_RANKS for planned in _prompt_rounds(course))


# --- checks --------------------------------------------------------------------------------------------------------


def _checks(course: Course) -> list[Check]:
    first = STRANGERS[:MAX_REQS]
    turns = [course.owners[name] for name in first]
    most = max(len(step_facts.ids(step)) for step in course.steps)
    mixed = [planned for planned in _prompt_rounds(course) if not all(step_facts.is_prefill(step) for step in planned)]
    return [
        Check(
            "newcomers go to the ranks in turn",
            turns == [[place % NUM_RANKS] for place in range(len(first))],
            " ".join(f"{name}:{_ranks(course, name)}" for name in first),
        ),
        Check("each stays with its rank", all(len(owners) == 1 for owners in course.owners.values()), "for life"),
        Check("no rank has more than its places", 1 < most <= MAX_REQS // NUM_RANKS, f"at most {most}"),
        Check(
            "while any rank has prompts, nobody decodes",
            not mixed and _num_idling(course) > 0,
            f"{len(_prompt_rounds(course))} rounds of prompts, in {_num_idling(course)} a rank was idle",
        ),
        Check("who begins as another goes to its rank", *_drawn(course)),
        Check("what the rank knows is not computed again", *_reused(course)),
    ]


def _drawn(course: Course) -> tuple[bool, str]:
    right = [name for name, known in FRIENDS.items() if course.owners[name] == course.owners[known]]
    told = all(course.draws[name].get("rank") == course.owners[name][0] for name in FRIENDS)
    ranks = {rank for name in FRIENDS for rank in course.owners[name]}
    seen = " ".join(f"{name}:{_ranks(course, name)}" for name in FRIENDS)
    return len(right) == len(FRIENDS) and told and len(ranks) > 1, seen


def _reused(course: Course) -> tuple[bool, str]:
    """Check that the whole blocks of the known prompt are cached tokens of the response and of the first step."""
    found = [course.outputs[name].num_cached_tokens for name in FRIENDS]
    before = [next(step_facts.shares(course.steps, name))[1]["computed_before"] for name in FRIENDS]
    expected = [_PROMPT_TOKENS // BLOCK_SIZE * BLOCK_SIZE] * len(FRIENDS)
    return found == before == expected, f"{found} tokens cached, computed from token {before[0]} on"


STOP = Stop(
    "dp",
    "Data-parallel ranks: who goes where, and stays.",
    ("R188", "R189", "R190", "R194"),
    show,
)
