"""The stop `cow`: samples forked from one prompt share its last block until they write to it (copy on write)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from quire.client.outputs import RequestOutput
from quire.client.sampling_params import SamplingParams
from quire_tools.tour.pictures import share
from quire_tools.tour.screen import Check, Number, Screen, Stop
from quire_tools.tour.stage import EXACT, Stage, TourRequest, TourStack
from quire_tools.tour.tables import Step, Tables, before_copies, references, tables_of

BLOCK_SIZE = 16
_OUTPUT_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Case:
    """A request that forks: number of samples, and prompt tokens (16 per block)."""

    name: str
    num_samples: int
    prompt_tokens: int


ALONE = Case("one", 1, 20)
CASES = (Case("two", 2, 20), Case("four", 4, 20), Case("full", 4, 32))
"""Two and four samples of a prompt that ends within a block, and four of one that fills its blocks."""


@dataclass(frozen=True, slots=True)
class Fork:
    """The step in which all samples of a request write their first token's KV."""

    step: Step
    name: str

    @property
    def before(self) -> Tables:
        """Tables at the fork: before the step's copies, without the blocks that the step allocated."""
        group = share(self.step, self.name)
        num_blocks = -(-group["computed_before"] // BLOCK_SIZE) if group else 0
        return {name: blocks[:num_blocks] for name, blocks in before_copies(self.step, self.name).items()}

    @property
    def after(self) -> Tables:
        """Tables right after schedule()."""
        return tables_of(self.step, self.name)

    @property
    def copies(self) -> Sequence[Sequence[int]]:
        """`blocks_to_copy` of the step: (source, destination)."""
        return list(self.step["copy"])


def fork_of(steps: Sequence[Step], name: str) -> Fork:
    """The first decode step of a request."""
    step = next(step for step in steps if (group := share(step, name)) is not None and not group["prefill"])
    return Fork(step, name)


def show(stage: Stage) -> Screen:
    """The same greedy prompt with one, two and four samples, each request alone."""
    with stage.stack(tables=True, policy="vllm-v0", worker_args=EXACT) as stack:
        outputs = {case.name: _run(stack, case) for case in (ALONE, *CASES)}
        steps = stack.steps(tables=True)
    forks = {case.name: fork_of(steps, case.name) for case in CASES}
    return Screen(
        "Copy on write: who writes first copies",
        STOP.requirements,
        [
            "A prompt is computed once and its samples fork: same blocks, higher reference counts. Who writes into a block that "
            "others hold copies it first, so that of n sharers n - 1 copy and the last writes in place.",
            *(_picture(case, forks[case.name]) for case in CASES),
        ],
        [*(_copy_check(case, forks[case.name]) for case in CASES), _count_check(forks), _token_check(outputs)],
        _numbers(forks),
    )


def _run(stack: TourStack, case: Case) -> RequestOutput:
    """Run one request; greedy, so that a wrongly copied block shows in the tokens."""
    params = SamplingParams(n=case.num_samples, temperature=0.0, max_tokens=_OUTPUT_TOKENS, ignore_eos=True)
    [output] = stack.together([TourRequest(case.name, [500 + place for place in range(case.prompt_tokens)], params)])
    return output


def _picture(case: Case, fork: Fork) -> Table:
    copies = ", ".join(f"{src} -> {dst}" for src, dst in fork.copies) or "nothing"
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=40)
    table.add_column()
    table.add_row(
        Text(f"{case.num_samples} samples of {case.prompt_tokens} tokens: before", style="bold underline"),
        Text(f"step {fork.step['step']}, blocks_to_copy: {copies}", style="bold underline"),
    )
    for name in fork.after:
        table.add_row(_row(name, fork.before), _row(name, fork.after))
    return table


def _row(name: str, tables: Tables) -> Text:
    """Blocks of a sequence, each with its reference count."""
    counts, row = references(tables), Text(f"{name:<7}")
    for block in tables.get(name, ()):
        style = "black on yellow" if counts[block] > 1 else "black on green"
        row.append(f" {block} x{counts[block]} ", style=style).append(" ")
    return row


def _copy_check(case: Case, fork: Fork) -> Check:
    shared = case.prompt_tokens % BLOCK_SIZE
    wanted = case.num_samples - 1 if shared else 0
    sources = {src for src, _ in fork.copies}
    what = f"{case.num_samples} samples that share {'their last block' if shared else 'full blocks only'} copy {wanted}"
    return Check(
        what, len(fork.copies) == wanted and len(sources) <= 1, f"{len(fork.copies)} copied, {len(sources)} sources"
    )


def _count_check(forks: Mapping[str, Fork]) -> Check:
    """Check that each copy decrements its source's reference count, down to 1."""
    falls = {
        name: (references(fork.before)[source], references(fork.after)[source], len(fork.copies))
        for name, fork in forks.items()
        for source in {f"g{src}" for src, _ in fork.copies}
    }
    return Check(
        "each copy takes one reference from its source; the last owner keeps it",
        bool(falls) and all(before - copies == after == 1 for before, after, copies in falls.values()),
        ", ".join(f"{name}: {before} -> {after}" for name, (before, after, _) in falls.items()),
    )


def _token_check(outputs: Mapping[str, RequestOutput]) -> Check:
    alone = outputs[ALONE.name].outputs[0].token_ids
    same = [
        output.token_ids == alone
        for case in CASES
        if case.prompt_tokens == ALONE.prompt_tokens
        for output in outputs[case.name].outputs
    ]
    return Check("greedy samples are token for token what one alone is", all(same), f"{sum(same)} of {len(same)}")


def _numbers(forks: Mapping[str, Fork]) -> list[Number]:
    numbers = []
    for name, fork in forks.items():
        most = max(references(fork.before).values())
        numbers += [
            Number(f"{name}: copies", len(fork.copies), "R20"),
            Number(f"{name}: references before, most", most, "R19"),
        ]
    return numbers


STOP = Stop("cow", "Copy on write: a fork shares its last block, and the writers copy it.", ("R3", "R19", "R20"), show)
