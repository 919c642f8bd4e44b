"""The stop `crash`: the worker is killed while streams run; the streams continue with the same tokens."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from quire.client.sampling_params import SamplingParams
from quire.local_stack.stack import LocalStack
from quire_tools.tour import step_facts
from quire_tools.tour.pictures import Step
from quire_tools.tour.screen import Check, Number, Screen, Stop
from quire_tools.tour.stage import Stage, TourRequest, TourStack

NUM_REQUESTS, OUTPUT_TOKENS = 6, 120
NAMES = tuple(f"s{number}" for number in range(NUM_REQUESTS))
_PROMPT_TOKENS = 24
_KILL_AFTER = NUM_REQUESTS * OUTPUT_TOKENS // 3
"""Tokens received over all streams when the worker is killed."""
_REVIVE_EVERY_S = 0.02
_READ_TIMEOUT_S = 120.0
_COLUMNS = 88
_LEVELS = " ▁▂▃▄▅▆▇█"
_OPTIONS: Mapping[str, Any] = {
    "worker_args": ("--dtype", "float32", "--max-model-len", "256", "--num-gpu-blocks-override", "96"),
}


@dataclass(slots=True)
class Reading:
    """What one client received. `times_ns`: Unix time of each token; `is_in_order`: each token came once, at its position."""

    tokens: list[int] = field(default_factory=list)
    times_ns: list[int] = field(default_factory=list)
    is_in_order: bool = True


@dataclass(frozen=True, slots=True)
class Course:
    """The run with the kill.

    `reasons`: those of `quire why` for each request; `boots`: the worker's boot ids, before and after.
    """

    steps: Sequence[Step]
    readings: Sequence[Reading]
    undisturbed: Sequence[Sequence[int]]
    killed_ns: int
    boots: tuple[str, str]
    reasons: Sequence[Sequence[str]]
    pool: Mapping[str, int]

    @property
    def after(self) -> list[Step]:
        """Steps completed by the restarted worker."""
        return [step for step in self.steps if step["times"]["planned_ns"] > self.killed_ns and not step.get("error")]

    @property
    def recovery_s(self) -> float:
        """Seconds from the kill to the first result of the new worker."""
        return (self.after[0]["times"]["finished_ns"] - self.killed_ns) / 1e9 if self.after else float("inf")


def show(stage: Stage) -> Screen:
    """Six streams, undisturbed and with a kill -9 in the middle."""
    with stage.stack(**_OPTIONS) as stack:
        undisturbed = [list(output.outputs[0].token_ids) for output in stack.together(_requests("alone-"))]
        boot = stack.admin.workers()[0].boot_id
        with _revived(stack.local):
            readings, killed_ns = _read_and_kill(stack, _requests(""))
        course = Course(
            step_facts.about(stack.steps(), NAMES),
            readings,
            undisturbed,
            killed_ns,
            (boot, stack.admin.workers()[0].boot_id),
            [[episode["reason"] for episode in stack.why(name)["episodes"]] for name in NAMES],
            stack.blocks()["gpu"],
        )
    return Screen(
        "kill -9 of the worker in the middle of six streams",
        ("R200",),
        [
            f"{NUM_REQUESTS} streams of {OUTPUT_TOKENS} tokens. When {_KILL_AFTER} tokens are out the worker is killed. It is "
            "started again, the scheduler has all tokens computed again there, and the streams go on.",
            Text("tokens that clients got, over time:", style="bold"),
            _arrivals(course),
            Text(),
            _table(course),
        ],
        _checks(course),
        _numbers(course),
    )


# --- driving -------------------------------------------------------------------------------------------------------


def _requests(prefix: str) -> list[TourRequest]:
    return [
        TourRequest(
            f"{prefix}{name}",
            [100 + 50 * number + place for place in range(_PROMPT_TOKENS)],
            SamplingParams(temperature=0.8, seed=number, max_tokens=OUTPUT_TOKENS, ignore_eos=True),
        )
        for number, name in enumerate(NAMES)
    ]


@contextmanager
def _revived(local: LocalStack) -> Iterator[None]:
    """Restart services that die within this context."""
    stop = threading.Event()

    def revive() -> None:
        while not stop.wait(_REVIVE_EVERY_S):
            local.revive()

    with ThreadPoolExecutor(1, thread_name_prefix="revive") as thread:
        reviving = thread.submit(revive)
        try:
            yield
        finally:
            stop.set()
            reviving.result()


def _read_and_kill(stack: TourStack, requests: Sequence[TourRequest]) -> tuple[list[Reading], int]:
    """What the clients received, and when the worker was killed (Unix ns)."""
    readings = [Reading() for _ in requests]
    with ThreadPoolExecutor(len(requests), thread_name_prefix="stream") as threads:
        reads = [threads.submit(_read, stack, *pair) for pair in zip(requests, readings, strict=True)]
        stack.wait(lambda: _num_read(readings) >= _KILL_AFTER, "a third of the tokens", timeout_s=_READ_TIMEOUT_S)
        killed_ns = time.time_ns()
        os.kill(stack.local.pids["worker"], signal.SIGKILL)
        for read in reads:
            read.result(_READ_TIMEOUT_S)
    return readings, killed_ns


def _num_read(readings: Sequence[Reading]) -> int:
    return sum(len(reading.tokens) for reading in readings)


def _read(stack: TourStack, request: TourRequest, reading: Reading) -> None:
    with stack.start(request) as stream:
        for delta in stream:
            reading.is_in_order = reading.is_in_order and delta.token_offset == len(reading.tokens)
            reading.tokens += delta.token_ids
            reading.times_ns += [time.time_ns()] * len(delta.token_ids)


# --- what is shown -------------------------------------------------------------------------------------------------


def _arrivals(course: Course) -> Text:
    """One line per stream, one column per interval of time: number of tokens received in it."""
    start_ns = min(reading.times_ns[0] for reading in course.readings)
    stretch_ns = max(1, (max(reading.times_ns[-1] for reading in course.readings) - start_ns) // (_COLUMNS - 1))
    counts = [_counts(reading.times_ns, start_ns, stretch_ns) for reading in course.readings]
    most = max(max(line) for line in counts)
    picture = Text()
    for name, line in zip(NAMES, counts, strict=True):
        picture.append(f"{name} ", style="bold")
        picture.append("".join(_LEVELS[-(-8 * count // most)] for count in line) + "\n", style="green")
    mark = min(_COLUMNS - 1, (course.killed_ns - start_ns) // stretch_ns)
    length = f"{stretch_ns * _COLUMNS / 1e9:.1f} s"
    picture.append(" " * (3 + mark)).append("^ kill -9", style="bold red")
    return picture.append(length.rjust(_COLUMNS - mark - len("^ kill -9")), style="dim")


def _counts(times_ns: Sequence[int], start_ns: int, stretch_ns: int) -> list[int]:
    counts = [0] * _COLUMNS
    for at_ns in times_ns:
        counts[min(_COLUMNS - 1, (at_ns - start_ns) // stretch_ns)] += 1
    return counts


def _table(course: Course) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("stream", "tokens before", "computed again in step", "tokens computed again", "told by `quire why`"):
        table.add_column(name, no_wrap=True)
    for name, reading, reasons in zip(NAMES, course.readings, course.reasons, strict=True):
        again = next(step_facts.shares(course.after, name), (0, {"tokens": 0}))
        before = sum(at_ns <= course.killed_ns for at_ns in reading.times_ns)
        told = " ".join(reason for reason in dict.fromkeys(reasons) if reason in ("WORKER_LOST", "NO_WORKER"))
        table.add_row(name, str(before), str(again[0]), str(again[1]["tokens"]), told)
    return table


def _numbers(course: Course) -> list[Number]:
    return [
        Number("steps in all", len(course.steps)),
        Number("steps of the new worker", len(course.after)),
        Number("tokens computed again", _num_again(course.after), "R27"),
        Number("s from the kill to the next tokens", course.recovery_s),
        Number("tokens of the streams", _num_read(course.readings)),
        Number("steps that were lost on the way", sum(bool(step.get("error")) for step in course.steps)),
    ]


def _num_again(steps: Sequence[Step]) -> int:
    """Tokens recomputed because their KV was lost."""
    return sum(group["tokens"] for step in steps for group in step["scheduled"] if group["prefill"])


# --- checks --------------------------------------------------------------------------------------------------------


def _checks(course: Course) -> list[Check]:
    same = [reading.tokens == list(tokens) for reading, tokens in zip(course.readings, course.undisturbed, strict=True)]
    before = [sum(at <= course.killed_ns for at in reading.times_ns) for reading in course.readings]
    lost = sum("WORKER_LOST" in reasons for reasons in course.reasons)
    return [
        Check(
            "it was killed in the middle of all streams",
            all(0 < count < OUTPUT_TOKENS for count in before),
            f"{min(before)} to {max(before)} of {OUTPUT_TOKENS} tokens were out",
        ),
        Check(
            "another process goes on", len(set(course.boots)) == len(course.boots) and bool(course.after), "new boot"
        ),
        Check("nobody was told of an error, each token came once", *_once(course)),
        Check("tokens are those of an undisturbed run", all(same), f"{sum(same)} of {len(same)} streams equal"),
        Check("`quire why` says what happened", lost == NUM_REQUESTS, f"WORKER_LOST of {lost} requests"),
        Check(
            "all blocks are free at the end",
            course.pool["free"] == course.pool["total"],
            f"{course.pool['free']} of {course.pool['total']}",
        ),
    ]


def _once(course: Course) -> tuple[bool, str]:
    counts = [len(reading.tokens) for reading in course.readings]
    in_order = all(reading.is_in_order for reading in course.readings)
    return in_order and set(counts) == {OUTPUT_TOKENS}, f"{sum(counts)} tokens, none lost, none twice"


STOP = Stop("crash", "kill -9 of the worker in the middle of streams, which go on.", ("R200",), show)
