"""The stop `memory`: memory used by the same requests with paging, and with one contiguous region each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from quire.client.sampling_params import SamplingParams
from quire_tools.tour import pictures
from quire_tools.tour.pictures import BarPart
from quire_tools.tour.screen import Check, Number, Screen, Stop
from quire_tools.tour.stage import Stage, TourRequest, TourStack
from quire_tools.tour.tables import Step, is_scattered, num_logical, num_physical
from svc_common.errors import DeadlineExceeded

_WORKER_ARGS = ("--num-gpu-blocks-override", "121", "--max-model-len", "1024")
"""One of the 121 blocks is the null block, which is never allocated."""
_PLACES = 8
_LENGTHS = (
    (150, 60), (37, 200), (201, 50), (90, 120), (64, 180), (120, 90), (180, 70), (75, 150), (230, 60), (50, 210),
)  # fmt: skip
"""Tokens of prompt and output of each request."""
_KINDS = (
    ("used", "a token is in it", "█", "green"),
    ("reserved", "kept for tokens that may come", "▓", "yellow"),
    ("internal", "rounding: no token can come", "▒", "magenta"),
    ("external", "too small for who waits", "░", "red"),
    ("free", "for anybody", "·", "bright_black"),
)
_LOST = ("reserved", "internal", "external")


@dataclass(frozen=True, slots=True)
class Moment:
    """The memory report at one instant, and the step after which it was read."""

    step: int
    report: Mapping[str, Any]

    @property
    def num_slots(self) -> int:
        """Token slots in the whole memory: each holds the KV of one token."""
        return int(self.report["num_blocks"] * self.report["block_size"])

    @property
    def paged(self) -> dict[str, int]:
        """Slots by kind, as they are."""
        used, wasted = self.report["num_tokens"], self.report["waste_tokens"]
        return {"used": used, "reserved": 0, "internal": wasted, "external": 0, "free": self.num_slots - used - wasted}

    @property
    def contiguous(self) -> dict[str, int]:
        """Slots by kind, as they would be without paging."""
        found = self.report["contiguous"]
        kinds = {name: round(found[name] * found["num_slots"]) for name, *_ in _KINDS[:-1]}
        return kinds | {"free": self.num_slots - sum(kinds.values())}


def show(stage: Stage) -> Screen:
    """Requests of different lengths fill a small memory; its fullest moment is drawn."""
    with stage.stack(tables=True, worker_args=_WORKER_ARGS, max_num_seqs=_PLACES) as stack:
        moments = _moments(stack)
        steps, pool = stack.steps(tables=True), stack.blocks()["gpu"]
    moment = _fullest(moments, steps)
    return Screen(
        "One memory, two ways to divide it",
        STOP.requirements,
        [
            f"{moment.report['num_sequences']} requests run after step {moment.step}. Contiguous allocation would give each a "
            "region for its longest, rounded up to a power of two; paging gives a block of 16 when a token needs it.",
            pictures.bars({name: _bar(slots) for name, slots in _both(moment).items()}, unit=" slots"),
            _kinds(moment),
        ],
        [
            *_checks(moment, steps),
            Check(
                "at the end all blocks are free", pool["free"] == pool["total"], f"{pool['free']} of {pool['total']}"
            ),
        ],
        _numbers(moment),
    )


def _moments(stack: TourStack) -> list[Moment]:
    """Read the memory report repeatedly while the requests run."""
    streams, moments = [stack.start(request) for request in _requests()], list[Moment]()
    while (load := stack.admin.load()).queues.running or load.num_waiting or not moments:
        moments.append(Moment(*stack.memory_after()))
    for stream in streams:
        stream.read()
    return moments


def _fullest(moments: Sequence[Moment], steps: Sequence[Step]) -> Moment:
    """The plain moment with most sequences, and among these with most tokens."""
    plain = [moment for moment in moments if _is_plain(moment, steps)]
    if not plain:
        raise DeadlineExceeded("the memory was never read while all requests made tokens", reason="TOUR_TIMEOUT")
    return max(plain, key=lambda moment: (moment.report["num_sequences"], moment.report["num_tokens"]))


def _requests() -> list[TourRequest]:
    return [
        TourRequest(
            chr(ord("A") + number),
            [200 + 11 * number + place for place in range(prompt)],
            SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0),
        )
        for number, (prompt, output) in enumerate(_LENGTHS)
    ]


def _bar(slots: Mapping[str, int]) -> list[BarPart]:
    return [BarPart(name, slots[name], sign, style) for name, _, sign, style in _KINDS]


def _kinds(moment: Moment) -> Table:
    """One line per kind of slot: its share without paging and with it."""
    table = Table.grid(padding=(0, 2))
    for _ in range(4):
        table.add_column()
    table.add_row("", "", "contiguous", "paged", style="bold")
    for name, meaning, sign, style in _KINDS:
        shares = [
            pictures.bar([BarPart(name, slots[name], sign, style)], total=moment.num_slots, width=18).append(
                f" {slots[name] / moment.num_slots:.1%}", style="default"
            )
            for slots in _both(moment).values()
        ]
        table.add_row(pictures.legend((sign, style, name)), meaning, *shares)
    return table


def _numbers(moment: Moment) -> list[Number]:
    report, paged = moment.report, moment.paged
    lost = sum(moment.contiguous[kind] for kind in _LOST)
    return [
        Number("step", moment.step),
        Number("sequences", report["num_sequences"], "R209"),
        Number("tokens with a slot", report["num_tokens"], "R209"),
        Number("blocks taken", report["physical_blocks"], "R15"),
        Number("paged: slots without a token", paged["internal"], "R14"),
        Number("paged: most of one sequence", report["max_waste_tokens"], "R14"),
        Number("contiguous: slots without a token", lost, "R209"),
        Number("contiguous: without a place", report["contiguous"]["num_left_out"], "R209"),
    ]


def _checks(moment: Moment, steps: Sequence[Step]) -> list[Check]:
    step = next(step for step in steps if step["step"] == moment.step)
    report, size = moment.report, moment.report["block_size"]
    held, taken = _held(step, size), num_physical(step["tables"])
    room = num_logical(step["tables"]) * size
    worst = max(_room_left(step, size) for step in steps)
    lost = {name: sum(moment_slots[kind] for kind in _LOST) for name, moment_slots in _both(moment).items()}
    scattered = sum(is_scattered(blocks) for blocks in step["tables"].values())
    return [
        Check(
            "the report says what the step's tables say",
            (report["num_tokens"], report["physical_blocks"], report["waste_tokens"]) == (held, taken, room - held),
            f"{held} tokens in {taken} blocks, {room - held} slots left over",
        ),
        Check(
            "no step leaves a sequence a block's worth of slots",
            worst < size,
            f"at most {worst} of {size} in {len(steps)} steps",
        ),
        Check("blocks of a sequence need not be neighbours", scattered > 0, f"{scattered} tables are scattered"),
        Check(
            "paging loses less",
            lost["paged"] < lost["contiguous"],
            f"{lost['paged']} slots against {lost['contiguous']}",
        ),
    ]


def _both(moment: Moment) -> dict[str, dict[str, int]]:
    return {"contiguous": moment.contiguous, "paged": moment.paged}


def _held(step: Step, block_size: int) -> int:
    """Tokens with a slot: those computed with this step, plus the sampled one if its slot is already allocated."""
    return sum(
        min(group["computed_before"] + group["tokens"] + 1, len(step["tables"][f"{group['id']}/0"]) * block_size)
        for group in step["scheduled"]
    )


def _room_left(step: Step, block_size: int) -> int:
    """Most slots that a sequence of the step has beyond its computed tokens."""
    rooms = [
        len(step["tables"][f"{group['id']}/0"]) * block_size - group["computed_before"] - group["tokens"]
        for group in step["scheduled"]
    ]
    return int(max(rooms))


def _is_plain(moment: Moment, steps: Sequence[Step]) -> bool:
    """True if every sequence with blocks decoded one token in the moment's step."""
    step = next((step for step in steps if step["step"] == moment.step), None)
    if step is None:
        return False
    decodes = [group for group in step["scheduled"] if not group["prefill"]]
    return bool(len(decodes) == len(step["scheduled"]) == len(step["tables"]) == moment.report["num_sequences"])


STOP = Stop(
    "memory",
    "Memory of contiguous allocation against paged: used, reserved, internal, external.",
    ("R14", "R15", "R16", "R17", "R209"),
    show,
)
