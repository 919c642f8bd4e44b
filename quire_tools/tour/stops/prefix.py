"""The stop `prefix`: prefix-cache hits, the computation they save, and the order of eviction."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from quire.client.outputs import RequestOutput
from quire.client.sync_client import RequestOptions
from quire_tools.tour import pictures, step_facts
from quire_tools.tour.pictures import BarPart, Step
from quire_tools.tour.scenario import request
from quire_tools.tour.screen import Check, Number, declared
from quire_tools.tour.stage import EXACT, Stage, TourRequest, TourStack

_BLOCK_SIZE, _BUDGET = 16, 64
_OPTIONS: dict[str, Any] = {
    "worker_args": (*EXACT, "--num-gpu-blocks-override", "41", "--max-model-len", "512"),
    "max_num_batched_tokens": _BUDGET,
    "max_num_seqs": _BUDGET,
}
_PROMPT = [1_000 + place for place in range(40)]
_LONG = [1_500 + place for place in range(200)]
_OTHERS = [2_000 + place for place in range(416)]
_FIRST_OUTPUT, _OUTPUT = 25, 4
_EXPECTED = {
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
class PrefixHits:
    """Steps and outputs.

    `before`, `after`: unreferenced cached blocks, next to be evicted first, before and after the request
    `others`, which needs many blocks.
    """

    steps: Sequence[Step]
    outputs: Mapping[str, RequestOutput]
    before: Sequence[str]
    after: Sequence[str]

    def prefills(self, name: str) -> list[Mapping[str, int]]:
        """Entries of a request in the steps that compute its prompt."""
        return [group for _, group in step_facts.shares(self.steps, name) if group["prefill"]]

    def cached(self, name: str) -> int:
        """Tokens that count as computed before the request's first step."""
        return self.prefills(name)[0]["computed_before"]

    @property
    def taken(self) -> set[str]:
        """All blocks that `others` ever had."""
        return {block for step in self.steps for block in step["tables"].get("others/0", ())}

    @property
    def evicted(self) -> list[str]:
        """Cached blocks allocated to `others`, in the order of `before`."""
        return [block for block in self.before if block in self.taken]

    @property
    def kept(self) -> list[str]:
        """Blocks of `after` not taken by `others`, in their current order."""
        return [block for block in self.after if block not in self.taken]


def _observe(stage: Stage) -> PrefixHits:
    """Requests one after the other: hits and misses, one that takes most blocks, and a check of what is still cached."""
    with stage.stack(tables=True, **_OPTIONS) as stack:
        outputs = {"cold": _run(stack, "cold", _PROMPT, _FIRST_OUTPUT)}
        prompts = {
            "again": _PROMPT,
            "half": _PROMPT[:32],
            "shifted": [9, *_PROMPT[:39]],
            "salted": _PROMPT,
            "answer": [*_PROMPT, *outputs["cold"].outputs[0].token_ids[: _FIRST_OUTPUT - 1], 9],
            "long": _LONG,
            "long-2": _LONG,
        }
        outputs |= {name: _run(stack, name, prompt) for name, prompt in prompts.items()}
        before = stack.cached_blocks()
        _run(stack, "others", _OTHERS)
        after = stack.cached_blocks()
        _run(stack, "long-3", _LONG)
        _run(stack, "again-2", _PROMPT)
        return PrefixHits(stack.steps(tables=True), outputs, before, after)


def _run(stack: TourStack, name: str, prompt: Sequence[int], num_output: int = _OUTPUT) -> RequestOutput:
    options = RequestOptions(cache_salt="tour") if name == "salted" else RequestOptions()
    params = request(name, 0, num_output).params
    [output] = stack.together([TourRequest(name, prompt, params, options)])
    return output


def _picture(hits: PrefixHits) -> Iterator[RenderableType]:
    yield pictures.grid(_hit_row(hits, name, what) for name, (_, what) in _EXPECTED.items())
    yield pictures.legend(("░", "cyan", "found in the cache"), ("█", "green", "computed"))
    row = Text("Unreferenced cached blocks, next to be evicted first; red: evicted for 416 other tokens:\n")
    for block in hits.before:
        row.append(block, style="black on red" if block in hits.taken else "black on green").append(" ")
    yield row


def _hit_row(hits: PrefixHits, name: str, what: str) -> list[RenderableType]:
    cached, prefills = hits.cached(name), hits.prefills(name)
    computed = sum(group["tokens"] for group in prefills)
    parts = [BarPart("cached", cached, "░", "cyan"), BarPart("computed", computed, "█", "green")]
    num_steps = f"{len(prefills)} step{'s' if len(prefills) > 1 else ''}"
    bar = pictures.bar(parts, total=200, width=25)
    return [Text(name, style="bold"), bar, f"{cached} + {computed}", num_steps, Text(what, style="dim")]


def _numbers(hits: PrefixHits) -> list[Number]:
    return [
        *(Number(f"{name}: cached tokens", hits.cached(name)) for name in _EXPECTED),
        Number("others: cached blocks evicted", len(hits.evicted)),
        Number("cached blocks that stayed", len(hits.kept)),
    ]


def _checks(hits: PrefixHits) -> list[Check]:
    found = {name: hits.cached(name) for name in _EXPECTED}
    told = {name: hits.outputs[name].num_cached_tokens or 0 for name in _EXPECTED}
    long, short = (len(hits.prefills(name)) for name in ("long", "long-2"))
    first, again = (hits.outputs[name].outputs[0].token_ids for name in ("cold", "again"))
    old, new = hits.cached("again-2"), hits.cached("long-3")
    return [
        Check(
            "hits are as the rules say",
            found == {name: cached for name, (cached, _) in _EXPECTED.items()},
            ", ".join(f"{name} {count}" for name, count in found.items()),
        ),
        Check("the client reads the same number", told == found, f"{sum(told.values())} cached tokens in all"),
        Check("a hit relieves the budget", (long, short) == (4, 1), f"200 tokens in {long} steps, then in {short}"),
        Check("same prompt, same tokens", again == first[:_OUTPUT], f"{again}"),
        Check(
            "blocks are evicted in this order, no others",
            bool(hits.evicted) and [*hits.evicted, *hits.kept] == list(hits.before),
            f"{len(hits.evicted)} of {len(hits.before)} evicted",
        ),
        Check("the last used prefix is still cached", (old, new) == (0, 192), f"long {new}, the older prompt {old}"),
    ]


STOP = declared(
    "prefix",
    "Prefix caching: hit rules, what a hit saves, and the evictor's order under pressure.",
    "docs/architecture.md#6-blocks",
    title="Prefix caching: what is found, and what is evicted first",
    text=f"A prompt finds full blocks of {_BLOCK_SIZE} tokens that hold the same tokens at the same positions; cached tokens need "
    f"no computation and none of a step's {_BUDGET} tokens. When blocks run short the least recently used are evicted first.",
    observe=_observe,
    picture=_picture,
    checks=_checks,
    numbers=_numbers,
)
