"""The stop `prefix`: prefix-cache hits, the computation they save, and the order of eviction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from quire.client.outputs import RequestOutput
from quire.client.sampling_params import SamplingParams
from quire.client.sync_client import RequestOptions
from quire_tools.tour import pictures
from quire_tools.tour.pictures import BarPart, Step, share
from quire_tools.tour.screen import Check, Number, Screen, Stop
from quire_tools.tour.stage import EXACT, Stage, TourRequest, TourStack

BLOCK_SIZE, BUDGET = 16, 64
_WORKER_ARGS = (*EXACT, "--num-gpu-blocks-override", "41", "--max-model-len", "512")
_PROMPT = [1_000 + place for place in range(40)]
_LONG = [1_500 + place for place in range(200)]
_OTHERS = [2_000 + place for place in range(416)]
_FIRST_OUTPUT, _OUTPUT = 25, 4
EXPECTED = {
    "cold": (0, "new to the cache"),
    "again": (32, "the same prompt: its full blocks"),
    "half": (16, "its first 32: one at least is computed"),
    "shifted": (0, "one token in front: other positions"),
    "salted": (0, "the same with a cache salt"),
    "answer": (64, "prompt and output of cold, and one more"),
    "long": (0, "200 tokens, 64 a step"),
    "long-2": (192, "the same again"),
}
"""Cached tokens of each request, and what it is."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """Unreferenced cached blocks, next to be evicted first, before and after a request that needs many blocks.

    `taken`: the blocks of that request.
    """

    before: Sequence[str]
    after: Sequence[str]
    taken: Sequence[str]

    @property
    def gone(self) -> list[str]:
        """Cached blocks allocated to the request, which are the head of `before`, in order."""
        return [block for block in self.before if block in self.taken]

    @property
    def left(self) -> list[str]:
        """Blocks of `after` not taken by the request, in their current order."""
        return [block for block in self.after if block not in self.taken]


def show(stage: Stage) -> Screen:
    """Requests one after the other: hits and misses, one that takes most blocks, and a check of what is still cached."""
    with stage.stack(
        tables=True, worker_args=_WORKER_ARGS, max_num_batched_tokens=BUDGET, max_num_seqs=BUDGET
    ) as stack:
        outputs = _hits(stack)
        before = stack.cached_blocks()
        stack.together([_request("others", _OTHERS)])
        after = stack.cached_blocks()
        stack.together([_request("long-3", _LONG)])
        stack.together([_request("again-2", _PROMPT)])
        steps = stack.steps(tables=True)
    eviction = Eviction(before, after, taken_by(steps, "others"))
    return Screen(
        "Prefix caching: what is found, and what goes first",
        STOP.requirements,
        [
            f"A prompt finds full blocks of {BLOCK_SIZE} tokens that hold the same tokens at the same places; what is found needs "
            f"no computing and none of a step's {BUDGET} tokens. When blocks run short the least recently used go first.",
            _hit_table(steps),
            pictures.legend(("░", "cyan", "found in the cache"), ("█", "green", "computed")),
            _eviction_row(eviction),
        ],
        [*_hit_checks(steps, outputs), *_eviction_checks(steps, eviction)],
        _numbers(steps, eviction),
    )


def _hits(stack: TourStack) -> dict[str, RequestOutput]:
    """Run the requests of EXPECTED one after the other."""
    [cold] = stack.together([_request("cold", _PROMPT, _FIRST_OUTPUT)])
    answer = [*_PROMPT, *cold.outputs[0].token_ids[: _FIRST_OUTPUT - 1], 9]
    prompts = {
        "again": _PROMPT,
        "half": _PROMPT[:32],
        "shifted": [9, *_PROMPT[:39]],
        "salted": _PROMPT,
        "answer": answer,
        "long": _LONG,
        "long-2": _LONG,
    }
    made = {name: stack.together([_request(name, prompt)])[0] for name, prompt in prompts.items()}
    return {"cold": cold, **made}


def _request(name: str, prompt: Sequence[int], num_tokens: int = _OUTPUT) -> TourRequest:
    options = RequestOptions(cache_salt="tour") if name == "salted" else RequestOptions()
    return TourRequest(
        name, prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0), options=options
    )


# --- reading the steps ---------------------------------------------------------------------------------------------


def prefills(steps: Sequence[Step], name: str) -> list[Mapping[str, int]]:
    """Entries of a request in the steps that compute its prompt."""
    shares = [share(step, name) for step in steps]
    return [group for group in shares if group is not None and group["prefill"]]


def cached_tokens(steps: Sequence[Step], name: str) -> int:
    """Tokens that count as computed before the request's first step."""
    return prefills(steps, name)[0]["computed_before"]


def computed_tokens(steps: Sequence[Step], name: str) -> int:
    """Tokens of the request's prompt that are computed."""
    return sum(group["tokens"] for group in prefills(steps, name))


def taken_by(steps: Sequence[Step], name: str) -> list[str]:
    """All blocks that a request with one choice ever had."""
    return list(dict.fromkeys(block for step in steps for block in step["tables"].get(f"{name}/0", ())))


# --- drawing -------------------------------------------------------------------------------------------------------


def _hit_table(steps: Sequence[Step]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, (_, what) in EXPECTED.items():
        cached, computed = cached_tokens(steps, name), computed_tokens(steps, name)
        parts = [BarPart("cached", cached, "░", "cyan"), BarPart("computed", computed, "█", "green")]
        num_steps = len(prefills(steps, name))
        table.add_row(
            Text(name, style="bold"),
            pictures.bar(parts, total=200, width=25),
            f"{cached} + {computed}",
            f"{num_steps} step{'s' if num_steps > 1 else ''}",
            Text(what, style="dim"),
        )
    return table


def _eviction_row(eviction: Eviction) -> Text:
    row = Text("Cached and held by nobody, next to be evicted first; red ones went when 416 other tokens came:\n")
    for block in eviction.before:
        gone = block in eviction.taken
        row.append(block, style="black on red" if gone else "black on green").append(" ")
    return row


def _numbers(steps: Sequence[Step], eviction: Eviction) -> list[Number]:
    return [
        *(Number(f"{name}: cached tokens", cached_tokens(steps, name), "R134") for name in EXPECTED),
        Number("others: cached blocks evicted", len(eviction.gone), "R137"),
        Number("cached blocks that stayed", len(eviction.left), "R137"),
    ]


# --- checks --------------------------------------------------------------------------------------------------------


def _hit_checks(steps: Sequence[Step], outputs: Mapping[str, RequestOutput]) -> list[Check]:
    found = {name: cached_tokens(steps, name) for name in EXPECTED}
    told = {name: outputs[name].num_cached_tokens or 0 for name in EXPECTED}
    long, short = (len(prefills(steps, name)) for name in ("long", "long-2"))
    return [
        Check(
            "hits are as the rules say",
            found == {name: cached for name, (cached, _) in EXPECTED.items()},
            ", ".join(f"{name} {count}" for name, count in found.items()),
        ),
        Check("the client is told the same", told == found, f"{sum(told.values())} cached tokens in all"),
        Check("a hit relieves the budget", (long, short) == (4, 1), f"200 tokens in {long} steps, then in {short}"),
        Check(
            "same prompt, same tokens",
            outputs["again"].outputs[0].token_ids == outputs["cold"].outputs[0].token_ids[:_OUTPUT],
            f"{outputs['again'].outputs[0].token_ids}",
        ),
    ]


def _eviction_checks(steps: Sequence[Step], eviction: Eviction) -> list[Check]:
    num_gone = len(eviction.gone)
    again, long = cached_tokens(steps, "again-2"), cached_tokens(steps, "long-3")
    return [
        Check(
            "who is next goes first, nobody else",
            num_gone > 0 and [*eviction.gone, *eviction.left] == list(eviction.before),
            f"{num_gone} of {len(eviction.before)} gone",
        ),
        Check("what was used last is still found", (again, long) == (0, 192), f"long {long}, the older prompt {again}"),
    ]


STOP = Stop(
    "prefix",
    "Prefix caching: hit rules, what a hit saves, and the evictor's order under pressure.",
    ("R22", "R107", "R108", "R116", "R134", "R137", "R138"),
    show,
)
