"""The stop `sharing`: samples and beams share the blocks of their prompt; the saving, beside its closed form."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from quire.client.sampling_params import BeamSearchParams
from quire_tools.tour import pictures
from quire_tools.tour.pictures import BarPart, share
from quire_tools.tour.scenario import Observation, Scenario, request
from quire_tools.tour.screen import Check, Number, declared
from quire_tools.tour.stage import TourRequest
from quire_tools.tour.tables import Step, num_logical, num_physical, references, tables_of

_PROMPT_TOKENS, _OUTPUT_TOKENS, _BLOCK_SIZE = 161, 338, 16
_SAMPLES, _BEAMS = {"n2": 2, "n4": 4, "n6": 6}, {"b4": 4}
_SHADES = ((1, "░", "bright_black"), (2, "▒", "yellow"), (3, "▓", "yellow"))


def _beams(name: str, width: int) -> TourRequest:
    params = BeamSearchParams(beam_width=width, max_tokens=96, ignore_eos=True).sampling_params()
    return TourRequest(name, request(name, _PROMPT_TOKENS, 96).prompt, params)


_SCENARIO = Scenario(
    [
        *(
            request(name, _PROMPT_TOKENS, _OUTPUT_TOKENS + 1, n=n, seed=n, temperature=1.0)
            for name, n in _SAMPLES.items()
        ),
        *(_beams(name, width) for name, width in _BEAMS.items()),
    ],
    tables=True,
)


def _decodes(seen: Observation, name: str) -> list[Step]:
    """The decode steps of a request; steps that compute its prompt are left out."""
    ours = [(step, share(step, name)) for step in seen.steps]
    return [step for step, group in ours if group is not None and not group["prefill"]]


def _blocks(seen: Observation, name: str) -> tuple[int, int]:
    """Blocks of a request summed over its decode steps: entries of its tables, and distinct blocks among them."""
    tables = [tables_of(step, name) for step in _decodes(seen, name)]
    return sum(map(num_logical, tables)), sum(map(num_physical, tables))


def _saved(seen: Observation, name: str) -> float:
    """Share of blocks saved by sharing."""
    logical, physical = _blocks(seen, name)
    return 1 - physical / logical


def _closed_form(n: int) -> float:
    """Saving 1 - sum of (floor(P/b) + n (L_t - floor(P/b))) / sum of n L_t over t = 1..O, with L_t = ceil((P + t) / b)."""
    shared = _PROMPT_TOKENS // _BLOCK_SIZE
    lengths = [-(-(_PROMPT_TOKENS + t) // _BLOCK_SIZE) for t in range(1, _OUTPUT_TOKENS + 1)]
    return 1 - sum(shared + n * (length - shared) for length in lengths) / (n * sum(lengths))


def _picture(seen: Observation) -> Iterator[RenderableType]:
    samples, beams = _decodes(seen, "n4"), _decodes(seen, "b4")
    yield pictures.side_by_side(
        ("tables of 4 samples, middle of the run", _tables(tables_of(samples[len(samples) // 2], "n4"))),
        ("tables of 4 beams, last step", _tables(tables_of(beams[-1], "b4"))),
    )
    shades = ((sign, style, f"shared by {count}") for count, sign, style in _SHADES)
    yield pictures.legend(*shades, ("█", "green", "by 4 or more"))
    yield pictures.bars({_label(seen, name): _bar(_saved(seen, name)) for name in seen.names}, unit=None)
    yield pictures.legend(("█", "green", "physical blocks"), ("░", "bright_black", "saved, of all logical ones"))


def _tables(tables: Mapping[str, Sequence[str]]) -> Table:
    """One row per sequence, one character per logical block that shows how many sequences share it."""
    counts, grid = references(tables), Table.grid(padding=(0, 1))
    for sequence, blocks in tables.items():
        shades = (_shade(counts[block]) for block in blocks)
        grid.add_row(sequence, Text.assemble(*shades), str(len(blocks)))
    grid.add_row("", f"{num_physical(tables)} different blocks", str(num_logical(tables)))
    return grid


def _shade(count: int) -> tuple[str, str]:
    return next(((sign, style) for most, sign, style in _SHADES if count <= most), ("█", "green"))


def _label(seen: Observation, name: str) -> str:
    count = _SAMPLES.get(name) or _BEAMS[name]
    return f"{count} {'samples' if name in _SAMPLES else 'beams'} save {_saved(seen, name):.1%}"


def _bar(saved: float) -> list[BarPart]:
    return [
        BarPart("physical", 100 * (1 - saved), "█", "green"),
        BarPart("saved", 100 * saved, "░", "bright_black"),
    ]


def _numbers(seen: Observation) -> list[Number]:
    found = []
    for name in seen.names:
        logical, physical = _blocks(seen, name)
        found += [
            Number(f"{name}: logical, physical", f"{logical} {physical}"),
            Number(f"{name}: saved, percent", f"{_saved(seen, name):.2%}"),
        ]
    return found


def _checks(seen: Observation) -> list[Check]:
    saved = {name: _saved(seen, name) for name in seen.names}
    num_steps = {name: len(_decodes(seen, name)) for name in seen.names}
    return [
        *(
            Check(
                f"{n} samples save what the closed form says, over {_OUTPUT_TOKENS} decode steps",
                num_steps[name] == _OUTPUT_TOKENS and abs(saved[name] - _closed_form(n)) < 1e-12,
                f"{saved[name]:.4%} and {_closed_form(n):.4%}, {num_steps[name]} steps",
            )
            for name, n in _SAMPLES.items()
        ),
        *(
            Check(
                f"{width} beams save more than {width} samples",
                saved[name] > saved[f"n{width}"],
                f"{saved[name]:.1%} against {saved[f'n{width}']:.1%}",
            )
            for name, width in _BEAMS.items()
        ),
    ]


STOP = declared(
    "sharing",
    "Blocks of parallel samples and beams: logical against physical, beside the closed form.",
    "docs/generating.md#several-outputs",
    title="One prompt, several outputs",
    text=f"Samples of one request share the full blocks of their prompt ({_PROMPT_TOKENS} tokens) and have blocks of their own "
    "for their outputs; beams share prefixes of outputs as well.",
    observe=_SCENARIO.observe,
    picture=_picture,
    checks=_checks,
    numbers=_numbers,
)
