"""Results of a replay, as JSON values and as tables. Used by `quire replay`."""

import math
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.table import Table

from quire_tools.replay.memory_course import MemoryPoint
from quire_tools.replay.request_steps import RequestSteps
from quire_tools.replay.what_if import WhatIf
from quire_tools.simulation.history import Figures
from scheduler_svc.observe.recording.difference import Difference
from scheduler_svc.observe.recording.replay import ReplayReport

_MS = 1e3
_ROWS: tuple[tuple[str, str, float, str], ...] = (
    ("TTFT p50", "ttft_p50_s", _MS, "{:,.1f} ms"),
    ("TTFT p99", "ttft_p99_s", _MS, "{:,.1f} ms"),
    ("TPOT p50", "tpot_p50_s", _MS, "{:,.2f} ms"),
    ("TPOT p99", "tpot_p99_s", _MS, "{:,.2f} ms"),
    ("throughput", "throughput", 1, "{:,.1f} tokens/s"),
    ("preemptions", "num_preemptions", 1, "{:,.0f}"),
    ("lost tokens", "num_lost_tokens", 1, "{:,.0f}"),
    ("computed tokens", "num_computed_tokens", 1, "{:,.0f}"),
    ("fairness (Jain)", "fairness", 1, "{:.3f}"),
    ("requests done", "num_done", 1, "{:,.0f}"),
)


def replay_json(report: ReplayReport, requests: dict[str, RequestSteps]) -> dict[str, Any]:
    """JSON values of a plain replay."""
    return {
        "identical": report.identical,
        "steps": report.steps,
        "first_difference": _difference_json(report.first_difference),
        "requests": {name: steps.as_json() for name, steps in requests.items()},
    }


def what_if_json(found: WhatIf) -> dict[str, Any]:
    """JSON values of a what-if replay; steps before `from_step` are as recorded."""
    return {
        "identical": True,
        "steps": found.steps,
        "first_difference": None,
        "requests": {name: steps.as_json() for name, steps in found.requests.items()},
        "from_step": found.from_step,
        "fit_error": found.fit.error,
        "num_fitted_steps": found.fit.num_steps,
        "num_requests": found.num_requests,
        "censored": found.num_censored,
        "refused": found.num_refused,
        "stalled": found.predicted.has_stalled,
        "recorded": _figures_json(found.recorded.figures()),
        "predicted": _figures_json(found.predicted.figures()),
    }


def memory_json(points: list[MemoryPoint]) -> list[dict[str, Any]]:
    """Memory counts at some steps; shares as fractions."""
    return [
        {
            "step": point.step,
            "at_s": point.at_s,
            "num_blocks": point.num_blocks,
            "free": point.num_free,
            "num_sequences": point.report.paged.num_sequences,
            "num_tokens": point.report.paged.num_tokens,
            "logical_blocks": point.report.paged.logical_blocks,
            "physical_blocks": point.report.paged.physical_blocks,
            "saved": point.report.paged.saved,
            "waste_tokens": point.report.paged.waste_tokens,
            "waste": point.report.paged.waste,
            "contiguous": {
                **point.report.contiguous.shares(),
                "num_slots": point.report.contiguous.num_slots,
                "num_left_out": point.report.contiguous.num_left_out,
            },
        }
        for point in points
    ]


def _difference_json(found: Difference | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)


def _figures_json(figures: Figures) -> dict[str, float | None]:
    """Figures with non-finite values, which JSON lacks, as null."""
    values = asdict(figures)
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}


# --- as text ----------------------------------------------------------------------------------------------------------


def replay_text(report: ReplayReport, requests: dict[str, RequestSteps], num_segments: int) -> str:
    """Result of a plain replay as text."""
    if report.first_difference is None:
        ends: dict[str, int] = {}
        for steps in requests.values():
            ends[steps.end or "not over"] = ends.get(steps.end or "not over", 0) + 1
        counts = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
        return (
            f"identical: {report.steps:,} steps in {num_segments} segments, every decision as recorded\n"
            f"{len(requests):,} requests: {counts or 'none'}"
        )
    return f"DIFFERENT after {report.steps:,} steps\n{difference_text(report.first_difference)}"


def difference_text(found: Difference) -> str:
    """The first difference between two runs as text."""
    return f"step {found.step}, {found.field}:\n  recorded {found.recorded}\n  got      {found.got}"


def what_if_table(found: WhatIf, title: str) -> Group:
    """Recorded figures beside predicted ones, with notes on what the prediction rests on."""
    table = Table("", "recorded", title, "")
    for column in table.columns[1:]:
        column.justify = "right"
    before, after = found.recorded.figures(), found.predicted.figures()
    for name, key, factor, form in _ROWS:
        a, b = getattr(before, key) * factor, getattr(after, key) * factor
        table.add_row(name, _number(a, form), _number(b, form), _change(a, b))
    return Group(table, *_footnotes(found))


def _number(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else "-"


def _change(before: float, after: float) -> str:
    if not (math.isfinite(before) and math.isfinite(after) and before):
        return ""
    return f"{(after - before) / before:+.0%}"


def _footnotes(found: WhatIf) -> list[str]:
    notes = [
        f"from step {found.from_step}: {found.num_requests:,} requests that had no token before the recording, in modelled time",
        f"step times fitted to {found.fit.num_steps:,} recorded steps; median error {found.fit.error:.1%}",
    ]
    if found.num_censored:
        notes.append(
            f"{found.num_censored:,} requests are censored: the recording does not know their end; taken to end where it leaves "
            "them, or as long as others where they had no token yet"
        )
    if found.num_refused:
        notes.append(f"{found.num_refused:,} requests would be refused")
    if found.predicted.has_stalled:
        notes.append("requests were left that nothing could move any more")
    return notes


def memory_table(points: list[MemoryPoint]) -> Table:
    """One row per point."""
    table = Table("step", "sequences", "tokens", "logical", "physical", "free", "saved", "waste", "unpaged")
    for column in table.columns:
        column.justify = "right"
    for point in points:
        paged, contiguous = point.report.paged, point.report.contiguous
        table.add_row(
            str(point.step),
            f"{paged.num_sequences:,}",
            f"{paged.num_tokens:,}",
            f"{paged.logical_blocks:,}",
            f"{paged.physical_blocks:,}",
            f"{point.num_free:,}",
            f"{paged.saved:.1%}",
            f"{paged.waste:.1%}",
            f"{contiguous.shares()['used']:.1%}",
        )
    return table
