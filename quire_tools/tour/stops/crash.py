"""The stop `crash`: the worker is killed while streams run; the streams continue with the same tokens."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import RenderableType
from rich.text import Text

from quire.local_stack.stack import LocalStack
from quire_tools.tour import pictures, step_facts
from quire_tools.tour.pictures import Step
from quire_tools.tour.plots import EIGHTHS
from quire_tools.tour.scenario import Observation, observed, request, tiny_worker
from quire_tools.tour.screen import Check, Number, all_free, declared
from quire_tools.tour.stage import Stage, TourRequest, TourStack

_NUM_REQUESTS, _OUTPUT_TOKENS = 6, 120
_NAMES = tuple(f"s{number}" for number in range(_NUM_REQUESTS))
_KILL_AFTER = _NUM_REQUESTS * _OUTPUT_TOKENS // 3
"""Tokens received over all streams when the worker is killed."""
_REVIVE_EVERY_S = 0.02
_READ_TIMEOUT_S = 120.0
_COLUMNS = 88


@dataclass(slots=True)
class StreamReading:
    """What one client received. `times_ns`: Unix time of each token; `is_in_order`: each token came once, at its position."""

    tokens: list[int] = field(default_factory=list)
    times_ns: list[int] = field(default_factory=list)
    is_in_order: bool = True


@dataclass(frozen=True, slots=True)
class CrashRun:
    """The run with the kill, and an undisturbed one; `boots`: the worker's boot ids, before and after."""

    seen: Observation
    readings: Sequence[StreamReading]
    undisturbed: Observation
    killed_ns: int
    boots: tuple[str, str]

    @property
    def after(self) -> list[Step]:
        """Steps completed by the restarted worker."""
        later = [step for step in self.seen.steps if step["times"]["planned_ns"] > self.killed_ns]
        return [step for step in later if not step.get("error")]

    @property
    def recovery_s(self) -> float:
        """Seconds from the kill to the first result of the new worker."""
        return (self.after[0]["times"]["finished_ns"] - self.killed_ns) / 1e9 if self.after else float("inf")

    @property
    def before(self) -> list[int]:
        """Tokens that each stream had received at the kill."""
        return [sum(at_ns <= self.killed_ns for at_ns in reading.times_ns) for reading in self.readings]


def _observe(stage: Stage) -> CrashRun:
    """Six streams, undisturbed and with a kill -9 in the middle."""
    with stage.stack(worker_args=tiny_worker(256, 96)) as stack:
        undisturbed = observed(stack, stack.together(_requests("alone-")))
        boot = stack.admin.workers()[0].boot_id
        with _revived(stack.local):
            readings, killed_ns = _read_and_kill(stack, _requests(""))
        seen = observed(stack, [], names=_NAMES, why=True)
        return CrashRun(seen, readings, undisturbed, killed_ns, (boot, stack.admin.workers()[0].boot_id))


def _requests(prefix: str) -> list[TourRequest]:
    return [
        request(f"{prefix}{name}", 24, _OUTPUT_TOKENS, like=name, temperature=0.8, seed=number)
        for number, name in enumerate(_NAMES)
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


def _read_and_kill(stack: TourStack, requests: Sequence[TourRequest]) -> tuple[list[StreamReading], int]:
    """What the clients received, and when the worker was killed (Unix ns)."""
    readings = [StreamReading() for _ in requests]
    with ThreadPoolExecutor(len(requests), thread_name_prefix="stream") as threads:
        reads = [threads.submit(_read, stack, *pair) for pair in zip(requests, readings, strict=True)]
        stack.wait(lambda: _num_read(readings) >= _KILL_AFTER, "a third of the tokens", timeout_s=_READ_TIMEOUT_S)
        killed_ns = time.time_ns()
        os.kill(stack.local.pids["worker"], signal.SIGKILL)
        for read in reads:
            read.result(_READ_TIMEOUT_S)
    return readings, killed_ns


def _num_read(readings: Sequence[StreamReading]) -> int:
    return sum(len(reading.tokens) for reading in readings)


def _read(stack: TourStack, sent: TourRequest, reading: StreamReading) -> None:
    with stack.start(sent) as stream:
        for delta in stream:
            reading.is_in_order = reading.is_in_order and delta.token_offset == len(reading.tokens)
            reading.tokens += delta.token_ids
            reading.times_ns += [time.time_ns()] * len(delta.token_ids)


# --- what is shown -------------------------------------------------------------------------------------------------


def _picture(run: CrashRun) -> Iterator[RenderableType]:
    yield Text("tokens that clients received, over time:", style="bold")
    yield _arrivals(run)
    yield Text()
    headings = ("stream", "tokens before", "computed again in step", "tokens computed again", "reasons of `quire why`")
    yield pictures.table(headings, [_row(run, *pair) for pair in zip(_NAMES, run.before, strict=True)])


def _arrivals(run: CrashRun) -> Text:
    """One line per stream, one column per interval of time: number of tokens received in it."""
    start_ns = min(reading.times_ns[0] for reading in run.readings)
    column_ns = max(1, (max(reading.times_ns[-1] for reading in run.readings) - start_ns) // (_COLUMNS - 1))
    counts = [_counts(reading.times_ns, start_ns, column_ns) for reading in run.readings]
    most = max(max(line) for line in counts)
    picture = Text()
    for name, line in zip(_NAMES, counts, strict=True):
        picture.append(f"{name} ", style="bold")
        picture.append("".join(EIGHTHS[-(-8 * count // most)] for count in line) + "\n", style="green")
    mark, length = min(_COLUMNS - 1, (run.killed_ns - start_ns) // column_ns), f"{column_ns * _COLUMNS / 1e9:.1f} s"
    picture.append(" " * (3 + mark)).append("^ kill -9", style="bold red")
    return picture.append(length.rjust(_COLUMNS - mark - len("^ kill -9")), style="dim")


def _counts(times_ns: Sequence[int], start_ns: int, column_ns: int) -> list[int]:
    counts = [0] * _COLUMNS
    for at_ns in times_ns:
        counts[min(_COLUMNS - 1, (at_ns - start_ns) // column_ns)] += 1
    return counts


def _row(run: CrashRun, name: str, num_before: int) -> list[str]:
    step, group = next(step_facts.shares(run.after, name), (0, {"tokens": 0}))
    told = [reason for reason in ("WORKER_LOST", "NO_WORKER") if run.seen.told(name, reason)]
    return [name, str(num_before), str(step), str(group["tokens"]), " ".join(told)]


def _numbers(run: CrashRun) -> list[Number]:
    again = sum(group["tokens"] for step in run.after for group in step["scheduled"] if group["prefill"])
    return [
        Number("steps in all", len(run.seen.steps)),
        Number("steps of the new worker", len(run.after)),
        Number("tokens computed again", again),
        Number("s from the kill to the next tokens", run.recovery_s),
        Number("tokens of the streams", _num_read(run.readings)),
        Number("steps lost in flight", sum(bool(step.get("error")) for step in run.seen.steps)),
    ]


def _checks(run: CrashRun) -> list[Check]:
    counts = [len(reading.tokens) for reading in run.readings]
    same = [[reading.tokens] == tokens for reading, tokens in zip(run.readings, run.undisturbed.tokens, strict=True)]
    lost = sum(bool(run.seen.told(name, "WORKER_LOST")) for name in _NAMES)
    return [
        Check(
            "it was killed in the middle of all streams",
            all(0 < count < _OUTPUT_TOKENS for count in run.before),
            f"{min(run.before)} to {max(run.before)} of {_OUTPUT_TOKENS} tokens were received",
        ),
        Check("another process continues", run.boots[0] != run.boots[1] and bool(run.after), "new boot"),
        Check(
            "no client got an error, each token came once",
            all(reading.is_in_order for reading in run.readings) and set(counts) == {_OUTPUT_TOKENS},
            f"{sum(counts)} tokens, none lost, none twice",
        ),
        Check("tokens are those of an undisturbed run", all(same), f"{sum(same)} of {len(same)} streams equal"),
        Check("`quire why` says what happened", lost == _NUM_REQUESTS, f"WORKER_LOST of {lost} requests"),
        all_free(run.seen.pool),
    ]


STOP = declared(
    "crash",
    "kill -9 of the worker in the middle of streams, which continue.",
    "docs/reliability.md",
    title="kill -9 of the worker in the middle of six streams",
    text=f"{_NUM_REQUESTS} streams of {_OUTPUT_TOKENS} tokens. After {_KILL_AFTER} tokens the worker is killed. It is "
    "restarted, the scheduler recomputes all tokens there, and the streams continue.",
    observe=_observe,
    picture=_picture,
    checks=_checks,
    numbers=_numbers,
)
