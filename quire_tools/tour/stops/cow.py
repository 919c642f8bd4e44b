"""The stop `cow`: samples forked from one prompt share its last block until they write to it (copy on write)."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from quire_tools.tour import arrivals
from quire_tools.tour.pictures import share
from quire_tools.tour.scenario import Observation, Scenario, request
from quire_tools.tour.screen import Check, Number, declared
from quire_tools.tour.stage import EXACT, Stage
from quire_tools.tour.tables import Step, Tables, before_copies, references, tables_of

_BLOCK_SIZE = 16
_ALONE = "one"
_CASES = {"one": (1, 20), "two": (2, 20), "four": (4, 20), "full": (4, 32)}
"""Samples and prompt tokens: of prompts that end within a block, and of one that fills its blocks."""
_SCENARIO = Scenario(
    # greedy, so that a wrongly copied block shows in the tokens
    [request(name, num_prompt, 12, like="cow", n=n) for name, (n, num_prompt) in _CASES.items()],
    arrivals.in_turn,
    {"policy": "vllm-v0", "worker_args": EXACT},
    tables=True,
)


class Fork(NamedTuple):
    """The step in which all samples of a request write their first token's KV.

    `before`: tables before the step's copies, without the blocks that the step allocated; `after`: tables
    right after schedule(); `copies`: `blocks_to_copy` of the step, (source, destination).
    """

    name: str
    step: int
    before: Tables
    after: Tables
    copies: Sequence[Sequence[int]]

    @property
    def sources(self) -> set[str]:
        """Blocks that are copied."""
        return {f"g{source}" for source, _ in self.copies}


class ForkedSamples(NamedTuple):
    """The requests' forks, and all that was read."""

    forks: Sequence[Fork]
    seen: Observation


def _observe(stage: Stage) -> ForkedSamples:
    seen = _SCENARIO.observe(stage)
    return ForkedSamples([_fork(seen.steps, name) for name in _CASES if name != _ALONE], seen)


def _fork(steps: Sequence[Step], name: str) -> Fork:
    """The first decode step of a request."""
    found = ((step, share(step, name)) for step in steps)
    step, group = next((step, group) for step, group in found if group is not None and not group["prefill"])
    num_blocks = -(-group["computed_before"] // _BLOCK_SIZE)
    before = {key: blocks[:num_blocks] for key, blocks in before_copies(step, name).items()}
    return Fork(name, step["step"], before, tables_of(step, name), step["copy"])


def _picture(found: ForkedSamples) -> Iterator[RenderableType]:
    for fork in found.forks:
        num_samples, num_prompt = _CASES[fork.name]
        copies = ", ".join(f"{src} -> {dst}" for src, dst in fork.copies) or "nothing"
        table = Table.grid(padding=(0, 2))
        table.add_column(min_width=40)
        table.add_row(
            Text(f"{num_samples} samples of {num_prompt} tokens: before", style="bold underline"),
            Text(f"step {fork.step}, blocks_to_copy: {copies}", style="bold underline"),
        )
        for name in fork.after:
            table.add_row(_row(name, fork.before), _row(name, fork.after))
        yield table


def _row(name: str, tables: Tables) -> Text:
    """Blocks of a sequence, each with its reference count."""
    counts, row = references(tables), Text(f"{name:<7}")
    for block in tables.get(name, ()):
        style = "black on yellow" if counts[block] > 1 else "black on green"
        row.append(f" {block} x{counts[block]} ", style=style).append(" ")
    return row


def _numbers(found: ForkedSamples) -> list[Number]:
    return [
        number
        for fork in found.forks
        for number in (
            Number(f"{fork.name}: copies", len(fork.copies)),
            Number(f"{fork.name}: references before, most", max(references(fork.before).values())),
        )
    ]


def _checks(found: ForkedSamples) -> list[Check]:
    return [*map(_copy_check, found.forks), _count_check(found.forks), _token_check(found.seen)]


def _copy_check(fork: Fork) -> Check:
    num_samples, num_prompt = _CASES[fork.name]
    shared = num_prompt % _BLOCK_SIZE
    wanted = num_samples - 1 if shared else 0
    return Check(
        f"{num_samples} samples that share {'their last block' if shared else 'full blocks only'} copy {wanted}",
        len(fork.copies) == wanted and len(fork.sources) <= 1,
        f"{len(fork.copies)} copied, {len(fork.sources)} sources",
    )


def _count_check(forks: Sequence[Fork]) -> Check:
    """Check that each copy decrements its source's reference count, down to 1."""
    falls = [
        (fork.name, references(fork.before)[source], references(fork.after)[source], len(fork.copies))
        for fork in forks
        for source in fork.sources
    ]
    return Check(
        "each copy takes one reference from its source; the last owner keeps it",
        bool(falls) and all(before - copies == after == 1 for _, before, after, copies in falls),
        ", ".join(f"{name}: {before} -> {after}" for name, before, after, _ in falls),
    )


def _token_check(seen: Observation) -> Check:
    alone = seen.outputs[_ALONE].outputs[0].token_ids
    alike = [name for name, (_, num_prompt) in _CASES.items() if num_prompt == _CASES[_ALONE][1] and name != _ALONE]
    same = [sample.token_ids == alone for name in alike for sample in seen.outputs[name].outputs]
    return Check("greedy samples have the tokens of a single sample", all(same), f"{sum(same)} of {len(same)}")


STOP = declared(
    "cow",
    "Copy on write: a fork shares its last block, and the writers copy it.",
    "docs/architecture.md#6-blocks",
    title="Copy on write: a sequence copies a shared block before it writes",
    text="A prompt is computed once and its samples fork: same blocks, higher reference counts. A sample that writes into a "
    "shared block copies it first, so that of n sharers n - 1 copy and the last writes in place.",
    observe=_observe,
    picture=_picture,
    checks=_checks,
    numbers=_numbers,
)
