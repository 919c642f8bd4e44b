"""Timelines of steps as text: rows over one time axis, with marks for planning, waiting and running."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

from quire_tools.tour.pictures import Step

SCHEDULES, WAITS, RUNS, RETURNS, NOTHING = "S", "-", "█", "·", " "
_STYLES = {SCHEDULES: "bold magenta", WAITS: "yellow", RUNS: "green", RETURNS: "bright_black", NOTHING: ""}
NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """An interval in Unix ns, drawn with one sign."""

    start_ns: int
    end_ns: int
    sign: str

    @property
    def duration_ns(self) -> int:
        """Length in ns."""
        return self.end_ns - self.start_ns


# --- a step's times, as `quire steps --json` has them --------------------------------------------------------------


def planned(step: Step) -> TimelineSpan:
    """The step's schedule()."""
    times = step["times"]
    return TimelineSpan(times["planned_ns"], times["planned_ns"] + times["schedule_ns"], SCHEDULES)


def run(step: Step) -> TimelineSpan:
    """The step's execution on the worker: caches, inputs, model and sampling."""
    times = step["times"]
    busy_ns = sum(times[f"{part}_ns"] for part in ("cache", "prepare", "model", "sample"))
    return TimelineSpan(times["started_ns"], times["started_ns"] + busy_ns, RUNS)


def queued(step: Step) -> TimelineSpan:
    """The step's time in the worker's queue."""
    times = step["times"]
    return TimelineSpan(times["started_ns"] - times["queued_ns"], times["started_ns"], WAITS)


def in_flight(step: Step) -> TimelineSpan:
    """The step in flight: from its planning until its result was processed."""
    return TimelineSpan(step["times"]["planned_ns"], step["times"]["finished_ns"], RETURNS)


def num_planned_ahead(steps: Iterable[Step]) -> int:
    """Number of steps planned before the previous step's result was processed."""
    times = [step["times"] for step in steps]
    return sum(after["planned_ns"] < before["finished_ns"] for before, after in pairwise(times))


def gaps(spans: Sequence[TimelineSpan]) -> list[int]:
    """ns between the end of each span and the start of the next; 0 if they touch or overlap."""
    ordered = sorted(spans, key=lambda span: span.start_ns)
    return [max(0, after.start_ns - before.end_ns) for before, after in pairwise(ordered)]


def idle_share(spans: Sequence[TimelineSpan]) -> float:
    """Share of the time from first start to last end that no span covers."""
    whole = max(span.end_ns for span in spans) - min(span.start_ns for span in spans)
    return sum(gaps(spans)) / whole if whole else 0.0


def most_at_once(spans: Iterable[TimelineSpan]) -> int:
    """Largest number of spans that cover one instant; spans that only touch do not overlap."""
    edges = sorted((at, change) for span in spans for at, change in ((span.start_ns, 1), (span.end_ns, -1)))
    most = here = 0
    for _, change in edges:
        here += change
        most = max(most, here)
    return most


# --- the picture ---------------------------------------------------------------------------------------------------


def lanes(rows: Mapping[str, Sequence[TimelineSpan]], start_ns: int, end_ns: int, *, width: int = 88) -> Text:
    """One line per row; later spans cover earlier ones, each at least one column wide. The axis below is in ms."""
    label = max(len(name) for name in rows) + 1
    picture = Text()
    for name, spans in rows.items():
        picture.append(f"{name:<{label}}", style="bold")
        for sign in _line(spans, start_ns, end_ns, width):
            picture.append(sign, style=_STYLES.get(sign, "black on green"))
        picture.append("\n")
    end = f"{(end_ns - start_ns) / NS_PER_MS:.1f} ms"
    return picture.append(" " * label + "0" + end.rjust(width - 1), style="dim")


def _line(spans: Sequence[TimelineSpan], start_ns: int, end_ns: int, width: int) -> list[str]:
    line = [NOTHING] * width
    column = _column_of(start_ns, end_ns, width)
    for span in spans:
        if span.end_ns <= start_ns or span.start_ns >= end_ns:
            continue
        first = max(0, column(span.start_ns))
        last = min(width, max(first + 1, column(span.end_ns)))
        line[first:last] = [span.sign] * (last - first)
    return line


def _column_of(start_ns: int, end_ns: int, width: int) -> Callable[[int], int]:
    return lambda at_ns: int(width * (at_ns - start_ns) / (end_ns - start_ns))
