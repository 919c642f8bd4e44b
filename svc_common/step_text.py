"""Step reports as text, for `quire steps --decode` and for the scheduler's log of a failed step."""

from collections.abc import Sequence

from protos.inference.v1 import admin_pb2


def step_text(report: admin_pb2.StepReport) -> str:
    """Format a step in several lines: every group, swap, copy, preemption and sampled token."""
    return "\n".join([_head(report), *_composition(report, None), *_failure(report)])


def composition_text(report: admin_pb2.StepReport, most: int) -> str:
    """Format a step without sampled tokens.

    Lists the first `most` groups, preemptions and moves, and counts the rest.
    """
    bare = admin_pb2.StepReport()
    bare.CopyFrom(report)
    for field in ("sampled", "tables"):
        bare.ClearField(field)
    return "\n".join([_head(bare), *_composition(bare, most)])


def _head(report: admin_pb2.StepReport) -> str:
    return (
        f"step {report.step}  epoch {report.epoch}  lane {report.lane}  policy {report.policy}  "
        f"{report.duration_ns / 1e6:.2f} ms  computed {report.computed_tokens} tokens{_grant(report)}"
    )


def _grant(report: admin_pb2.StepReport) -> str:
    """How the step is part of a decode grant, and why the grant before was revoked."""
    granted = f"  grants {report.granted_steps} more" if report.granted_steps else ""
    revoked = f"  rest of a grant revoked: {report.revoked}" if report.revoked else ""
    return "  repeated by grant" if report.is_repeat else granted + revoked


def _composition(report: admin_pb2.StepReport, most: int | None) -> list[str]:
    sampled = {item.sequence: list(item.tokens) for item in report.sampled}
    lines = _first([_group_line(group, sampled) for group in report.scheduled[:most]], len(report.scheduled))
    preempted = [f"  preempted {item.id} by {item.mode}" for item in report.preempted[:most]]
    lines += _first(preempted, len(report.preempted))
    for name in ("swap_in", "swap_out", "copy"):
        pairs = getattr(report, name)
        if pairs:
            told = ", ".join(f"{pair.src} -> {pair.dst}" for pair in pairs[:most])
            more = "" if most is None or len(pairs) <= most else f", and {len(pairs) - most} more"
            lines.append(f"  {name.replace('_', ' ')}: {told}{more}")
    queues = report.queues
    lines.append(
        f"  queues: {queues.waiting} waiting, {queues.running} running, {queues.swapped} swapped; "
        f"free blocks: {report.free.gpu} gpu, {report.free.cpu} cpu"
    )
    return [*lines, *(f"  table {table.sequence}: {' '.join(table.blocks)}" for table in report.tables)]


def _first(lines: Sequence[str], num_all: int) -> list[str]:
    return [*lines, *([f"  and {num_all - len(lines)} more"] if len(lines) < num_all else [])]


def _failure(report: admin_pb2.StepReport) -> list[str]:
    return [f"  FAILED: {report.error}"] if report.error else []


def _group_line(group: admin_pb2.ScheduledGroup, sampled: dict[str, list[int]]) -> str:
    kind = "prefill" if group.prefill else "decode "
    end = group.computed_before + group.tokens
    tokens = [token for name in group.seqs for token in sampled.get(name, [])]
    result = f" -> {tokens}" if tokens else ""
    return f"  {kind} {group.id}  tokens {group.computed_before}..{end} ({group.tokens}){result}"
