"""The stop `sharing`: samples and beams share the blocks of their prompt; the saving, beside its closed form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from quire.client.sampling_params import BeamSearchParams, SamplingParams
from quire_tools.tour import pictures
from quire_tools.tour.pictures import BarPart, share
from quire_tools.tour.screen import Check, Number, Screen, Stop
from quire_tools.tour.stage import Stage, TourRequest
from quire_tools.tour.tables import Step, num_logical, num_physical, references, tables_of

PROMPT_TOKENS, OUTPUT_TOKENS, BLOCK_SIZE = 161, 338, 16
SAMPLES = {"n2": 2, "n4": 4, "n6": 6}
BEAMS = {"b4": 4}
_BEAM_TOKENS = 96
_SHADES = ((1, "░", "bright_black"), (2, "▒", "yellow"), (3, "▓", "yellow"))


@dataclass(frozen=True, slots=True)
class Holding:
    """Blocks of a request summed over its decode steps: entries of its tables, and distinct blocks among them."""

    num_steps: int
    logical: int
    physical: int

    @property
    def saved(self) -> float:
        """Share of blocks saved by sharing."""
        return 1 - self.physical / self.logical


def show(stage: Stage) -> Screen:
    """Three requests for several samples and a beam search run together, each with its own prompt."""
    with stage.stack(tables=True) as stack:
        stack.together(_requests())
        steps = stack.steps(tables=True)
    found = {name: holding(steps, name) for name in (*SAMPLES, *BEAMS)}
    return Screen(
        "One prompt, several outputs",
        STOP.requirements,
        [
            f"Samples of one request share the full blocks of their prompt ({PROMPT_TOKENS} tokens) and have blocks of their own "
            "for their outputs; beams share beginnings of outputs as well.",
            pictures.side_by_side(
                ("tables of 4 samples, middle of the run", _tables(_middle(steps, "n4"), "n4")),
                ("tables of 4 beams, last step", _tables(_decodes(steps, "b4")[-1], "b4")),
            ),
            pictures.legend(
                *((sign, style, f"held by {count}") for count, sign, style in _SHADES), ("█", "green", "by 4 or more")
            ),
            pictures.bars({_label(name, held): _bar(held) for name, held in found.items()}, unit=None),
            pictures.legend(("█", "green", "physical blocks"), ("░", "bright_black", "saved, of all logical ones")),
        ],
        _checks(found),
        _numbers(found),
    )


def _requests() -> list[TourRequest]:
    sampled = [
        TourRequest(name, _prompt(name), SamplingParams(n=n, max_tokens=OUTPUT_TOKENS + 1, ignore_eos=True, seed=n))
        for name, n in SAMPLES.items()
    ]
    beams = [
        TourRequest(
            name,
            _prompt(name),
            BeamSearchParams(beam_width=width, max_tokens=_BEAM_TOKENS, ignore_eos=True).sampling_params(),
        )
        for name, width in BEAMS.items()
    ]
    return sampled + beams


def _prompt(name: str) -> list[int]:
    """A different prompt for each request."""
    first = 300 + PROMPT_TOKENS * [*SAMPLES, *BEAMS].index(name)
    return [first + place for place in range(PROMPT_TOKENS)]


# --- reading the steps ---------------------------------------------------------------------------------------------


def _decodes(steps: Sequence[Step], name: str) -> list[Step]:
    """The decode steps of a request; steps that compute its prompt are left out."""
    ours = [(step, share(step, name)) for step in steps]
    return [step for step, group in ours if group is not None and not group["prefill"]]


def _middle(steps: Sequence[Step], name: str) -> Step:
    decodes = _decodes(steps, name)
    return decodes[len(decodes) // 2]


def holding(steps: Sequence[Step], name: str) -> Holding:
    """Blocks of a request summed over its decode steps."""
    tables = [tables_of(step, name) for step in _decodes(steps, name)]
    return Holding(len(tables), sum(map(num_logical, tables)), sum(map(num_physical, tables)))


def closed_form(n: int) -> float:
    """Saving 1 - sum of (floor(P/b) + n (L_t - floor(P/b))) / sum of n L_t over t = 1..O, with L_t = ceil((P + t) / b)."""
    shared = PROMPT_TOKENS // BLOCK_SIZE
    lengths = [-(-(PROMPT_TOKENS + t) // BLOCK_SIZE) for t in range(1, OUTPUT_TOKENS + 1)]
    return 1 - sum(shared + n * (length - shared) for length in lengths) / (n * sum(lengths))


# --- drawing -------------------------------------------------------------------------------------------------------


def _tables(step: Step, name: str) -> Table:
    """One row per sequence, one character per logical block that shows how many sequences share it."""
    tables = tables_of(step, name)
    counts = references(tables)
    grid = Table.grid(padding=(0, 1))
    for sequence, blocks in tables.items():
        row = Text()
        for block in blocks:
            sign, style = _shade(counts[block])
            row.append(sign, style=style)
        grid.add_row(sequence, row, str(len(blocks)))
    grid.add_row("", f"{num_physical(tables)} different blocks", str(num_logical(tables)))
    return grid


def _shade(count: int) -> tuple[str, str]:
    return next(((sign, style) for most, sign, style in _SHADES if count <= most), ("█", "green"))


def _label(name: str, found: Holding) -> str:
    count = SAMPLES.get(name) or BEAMS[name]
    return f"{count} {'samples' if name in SAMPLES else 'beams'} save {found.saved:.1%}"


def _bar(found: Holding) -> list[BarPart]:
    saved = 100 * found.saved
    return [BarPart("physical", 100 - saved, "█", "green"), BarPart("saved", saved, "░", "bright_black")]


def _numbers(found: Mapping[str, Holding]) -> list[Number]:
    numbers = []
    for name, held in found.items():
        numbers += [
            Number(
                f"{name}: logical, physical", f"{held.logical} {held.physical}", "R19" if name in SAMPLES else "R21"
            ),
            Number(f"{name}: saved, percent", f"{held.saved:.2%}", "R209" if name in SAMPLES else "R14"),
        ]
    return numbers


def _checks(found: Mapping[str, Holding]) -> list[Check]:
    return [
        *(
            Check(
                f"{n} samples save what the closed form says, over {OUTPUT_TOKENS} decode steps",
                found[name].num_steps == OUTPUT_TOKENS and abs(found[name].saved - closed_form(n)) < 1e-12,
                f"{found[name].saved:.4%} and {closed_form(n):.4%}, {found[name].num_steps} steps",
            )
            for name, n in SAMPLES.items()
        ),
        *(
            Check(
                f"{width} beams save more than {width} samples",
                found[name].saved > found[f"n{width}"].saved,
                f"{found[name].saved:.1%} against {found[f'n{width}'].saved:.1%}",
            )
            for name, width in BEAMS.items()
        ),
    ]


STOP = Stop(
    "sharing",
    "Blocks of parallel samples and beams: logical against physical, beside the closed form.",
    ("R14", "R19", "R21", "R209"),
    show,
)
