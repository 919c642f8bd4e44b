"""The stop `memory`: memory used by the same requests with paging, and with one contiguous region each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from quire_tools.tour import pictures
from quire_tools.tour.pictures import BarPart
from quire_tools.tour.scenario import request
from quire_tools.tour.screen import Check, Number, all_free, declared
from quire_tools.tour.stage import Stage, TourStack
from quire_tools.tour.tables import Step, is_scattered, num_logical, num_physical
from svc_common.errors import DeadlineExceeded

_WORKER_ARGS = ("--num-gpu-blocks-override", "121", "--max-model-len", "1024")
"""One of the 121 blocks is the null block, which is never allocated."""
_LENGTHS = (
    (150, 60), (37, 200), (201, 50), (90, 120), (64, 180), (120, 90), (180, 70), (75, 150), (230, 60), (50, 210),
)  # fmt: skip
"""Tokens of prompt and output of each request."""
_KINDS = (
    ("used", "holds a token", "█", "green"),
    ("reserved", "kept for tokens that may follow", "▓", "yellow"),
    ("internal", "rounding: never used", "▒", "magenta"),
    ("external", "too small for a waiting request", "░", "red"),
    ("free", "available", "·", "bright_black"),
)
_LOST = ("reserved", "internal", "external")


@dataclass(frozen=True, slots=True)
class MemoryMoment:
    """The memory report at one instant, the step after which it was read, all steps, and the pool in the end."""

    step: Step
    report: Mapping[str, Any]
    steps: Sequence[Step]
    pool: Mapping[str, int]

    @property
    def num_slots(self) -> int:
        """Token slots in the whole memory: each holds the KV of one token."""
        return int(self.report["num_blocks"] * self.report["block_size"])

    @property
    def slots(self) -> dict[str, dict[str, int]]:
        """Slots by kind: as they would be without paging, and as they are."""
        found, used, wasted = (self.report[name] for name in ("contiguous", "num_tokens", "waste_tokens"))
        kinds = {name: round(found[name] * found["num_slots"]) for name, *_ in _KINDS[:-1]}
        paged = {"used": used, "reserved": 0, "internal": wasted, "external": 0}
        return {
            name: slots | {"free": self.num_slots - sum(slots.values())}
            for name, slots in (("contiguous", kinds), ("paged", paged))
        }

    @property
    def lost(self) -> dict[str, int]:
        """Slots without a token that no other request can use."""
        return {name: sum(slots[kind] for kind in _LOST) for name, slots in self.slots.items()}


def _observe(stage: Stage) -> MemoryMoment:
    """Run requests of different lengths in a small memory; return its fullest moment."""
    with stage.stack(tables=True, worker_args=_WORKER_ARGS, max_num_seqs=8) as stack:
        reports = _reports(stack)
        steps, pool = stack.steps(tables=True), stack.blocks()["gpu"]
    by_number = {step["step"]: step for step in steps}
    known = [(by_number[number], report) for number, report in reports if number in by_number]
    plain = [(step, report) for step, report in known if _is_plain(step, report)]
    if not plain:
        raise DeadlineExceeded("the memory was never read while all requests decoded", reason="TOUR_TIMEOUT")
    step, report = max(plain, key=lambda pair: (pair[1]["num_sequences"], pair[1]["num_tokens"]))
    return MemoryMoment(step, report, steps, pool)


def _reports(stack: TourStack) -> list[tuple[int, dict[str, Any]]]:
    """Read the memory report repeatedly while the requests run."""
    requests = [request(chr(ord("A") + number), *lengths) for number, lengths in enumerate(_LENGTHS)]
    streams, reports = [stack.start(one) for one in requests], list[tuple[int, dict[str, Any]]]()
    while (load := stack.admin.load()).queues.running or load.num_waiting or not reports:
        reports.append(stack.memory_after())
    for stream in streams:
        stream.read()
    return reports


def _is_plain(step: Step, report: Mapping[str, Any]) -> bool:
    """True if every sequence with blocks decoded one token in the step."""
    decodes = [group for group in step["scheduled"] if not group["prefill"]]
    return bool(len(decodes) == len(step["scheduled"]) == len(step["tables"]) == report["num_sequences"])


def _picture(moment: MemoryMoment) -> Iterator[RenderableType]:
    yield (
        f"{moment.report['num_sequences']} requests run after step {moment.step['step']}. Contiguous allocation would give each "
        "a region for its longest output, rounded up to a power of two; paging gives a block of 16 when a token needs it."
    )
    yield pictures.bars(
        {
            name: [BarPart(kind, slots[kind], sign, style) for kind, _, sign, style in _KINDS]
            for name, slots in moment.slots.items()
        },
        unit=" slots",
    )
    table = pictures.grid([("", "", "contiguous", "paged")])
    table.rows[0].style = "bold"
    for kind, meaning, sign, style in _KINDS:
        shares = [
            pictures.bar([BarPart(kind, slots[kind], sign, style)], total=moment.num_slots, width=18).append(
                f" {slots[kind] / moment.num_slots:.1%}", style="default"
            )
            for slots in moment.slots.values()
        ]
        table.add_row(pictures.legend((sign, style, kind)), meaning, *shares)
    yield table


def _numbers(moment: MemoryMoment) -> list[Number]:
    report = moment.report
    return [
        Number("step", moment.step["step"]),
        Number("sequences", report["num_sequences"]),
        Number("tokens with a slot", report["num_tokens"]),
        Number("blocks taken", report["physical_blocks"]),
        Number("paged: slots without a token", report["waste_tokens"]),
        Number("paged: most of one sequence", report["max_waste_tokens"]),
        Number("contiguous: slots without a token", moment.lost["contiguous"]),
        Number("contiguous: requests left out", report["contiguous"]["num_left_out"]),
    ]


def _checks(moment: MemoryMoment) -> list[Check]:
    report, size, tables = moment.report, moment.report["block_size"], moment.step["tables"]
    held, taken = _held(moment.step, size), num_physical(tables)
    unused = num_logical(tables) * size - held
    worst = max(_most_unused(step, size) for step in moment.steps)
    scattered = sum(is_scattered(blocks) for blocks in tables.values())
    return [
        Check(
            "the report agrees with the step's tables",
            (report["num_tokens"], report["physical_blocks"], report["waste_tokens"]) == (held, taken, unused),
            f"{held} tokens in {taken} blocks, {unused} slots unused",
        ),
        Check(
            "no sequence ever has a block's worth of unused slots",
            worst < size,
            f"at most {worst} of {size} in {len(moment.steps)} steps",
        ),
        Check("blocks of a sequence need not be neighbours", scattered > 0, f"{scattered} tables are scattered"),
        Check(
            "paging loses less",
            moment.lost["paged"] < moment.lost["contiguous"],
            f"{moment.lost['paged']} slots against {moment.lost['contiguous']}",
        ),
        all_free(moment.pool),
    ]


def _room(step: Step, group: Mapping[str, Any], block_size: int) -> int:
    """Slots in the blocks of a group with one sequence."""
    return int(len(step["tables"][f"{group['id']}/0"]) * block_size)


def _held(step: Step, block_size: int) -> int:
    """Tokens with a slot: those computed with this step, plus the sampled one if its slot is already allocated."""
    return sum(
        min(group["computed_before"] + group["tokens"] + 1, _room(step, group, block_size))
        for group in step["scheduled"]
    )


def _most_unused(step: Step, block_size: int) -> int:
    """Most slots that a sequence of the step has beyond its computed tokens."""
    computed = (int(group["computed_before"] + group["tokens"]) for group in step["scheduled"])
    return max(_room(step, group, block_size) - count for group, count in zip(step["scheduled"], computed, strict=True))


STOP = declared(
    "memory",
    "Memory of contiguous allocation against paged: used, reserved, internal, external.",
    "docs/architecture.md#6-blocks",
    title="One memory, two ways to divide it",
    text="",
    observe=_observe,
    picture=_picture,
    checks=_checks,
    numbers=_numbers,
)
