"""Statistics of a scheduler's last steps: times and their parts, rates. Pure; the steps are read by quire_tools.top.live."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway_svc.lab import translation
from gateway_svc.lab.source import NO_CHANGE, Step
from protos.inference.v1 import admin_pb2
from svc_common.percentiles import percentiles

PARTS = ("schedule", "queued", "cache", "prepare", "model", "sample", "other")
"""Parts of a step's time: planning, waiting at the worker, swaps and copies, inputs, model, sampling, other
work of the worker."""

_NS_PER_S = 1_000_000_000
_NS_PER_MS = 1e6
_RATE_NS = 10 * _NS_PER_S
_LEAST_RATE_NS = _NS_PER_S
# A row of a step's report costs the scheduler about 8 us, so these limits keep each read below 0.02 s.
_MOST_ROWS, _LEAST_STEPS, _USUAL_ROWS = 2_000, 8, 16


@dataclass(frozen=True, slots=True)
class StepSample:
    """What is kept of one step. `parts_ms`: in the order of PARTS. `num_skipped`: unread steps before it."""

    step: int
    finished_ns: int
    duration_ms: float
    parts_ms: tuple[float, ...]
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    num_preempted: int
    num_moved: int
    is_repeat: bool
    failed: bool
    num_skipped: int = 0

    @classmethod
    def of(cls, step: Step, *, num_skipped: int = 0) -> "StepSample":
        """The sample of a completed step, live or recorded."""
        times, at_worker = step.times, step.times.duration_ms
        known = (times.cache_ms, times.prepare_ms, times.model_ms, times.sample_ms)
        return cls(
            step=step.step,
            finished_ns=round(times.finished_ms * _NS_PER_MS),
            duration_ms=at_worker,
            parts_ms=(times.schedule_ms, times.queued_ms, *known, max(0.0, at_worker - sum(known))),
            num_requests=len(step.shares),
            prompt_tokens=sum(share.tokens for share in step.shares if share.prefill),
            output_tokens=sum(step.sampled.values()),
            num_preempted=len(step.preempted),
            num_moved=len(step.swap_in) + len(step.swap_out) + len(step.copy),
            is_repeat=step.is_repeat,
            failed=bool(step.error),
            num_skipped=num_skipped,
        )


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Statistics of the last steps.

    Times in ms at the worker, oldest first; rates over the last 10 s, or less if less is known. `p50_ms`,
    `p99_ms`: None without steps. `shares`: of the total time of all steps, by part. `prompt_tokens_per_s`:
    computed ones, recomputed ones included. `num_repeated`: by decode grants. `blocks_moved`: swapped in or
    out, or copied. `is_sampled`: some steps were not read.
    """

    last_step: int
    num_steps: int
    durations_ms: tuple[float, ...]
    p50_ms: float | None
    p99_ms: float | None
    shares: dict[str, float]
    steps_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    requests_per_step: float
    num_preempted: int
    num_repeated: int
    blocks_moved: int
    num_failed: int
    is_sampled: bool


class StepWindow:
    """The last `max_steps` steps read, in order. Cleared when the step counter decreases, which means another scheduler."""

    def __init__(self, max_steps: int = 600) -> None:
        self.policy = ""
        self._samples: deque[StepSample] = deque(maxlen=max_steps)

    def since(self, newest: int) -> int:
        """First step to read if `newest` is the last one planned.

        No step is read twice; fewer are read if steps are large, since their messages are long.
        """
        last = self._samples[-1] if self._samples else None
        at_most = max(_LEAST_STEPS, _MOST_ROWS // max(1, last.num_requests if last else _USUAL_ROWS))
        first = newest - min(at_most, self._samples.maxlen or at_most) + 1
        if last is not None and newest >= last.step:
            first = max(first, last.step + 1)
        return max(1, first)

    def take(self, reports: Iterable[admin_pb2.StepReport], *, since: int) -> None:
        """Add reports of steps from `since` on."""
        for report in reports:
            last = self._samples[-1].step if self._samples else 0
            if report.step <= last:
                self._samples.clear()
                last = 0
            skipped = max(0, since - last - 1) if last else 0
            self.add(translation.step(report, NO_CHANGE, None), num_skipped=skipped)
            since = report.step + 1

    def add(self, step: Step, *, num_skipped: int = 0) -> None:
        """Add the next step; `num_skipped`: steps before it that were not read."""
        self._samples.append(StepSample.of(step, num_skipped=num_skipped))
        self.policy = step.policy

    def forget(self) -> None:
        """Reset, before steps of another scheduler."""
        self._samples.clear()

    def figures(self, now_ns: int) -> StepFigures:
        """The statistics at Unix time `now_ns`."""
        samples = list(self._samples)
        durations = [round(sample.duration_ms, 4) for sample in samples if not sample.failed]
        spread = percentiles(durations, observed=True)
        steps_per_s, prompt_tokens_per_s, output_tokens_per_s = _rates(samples, now_ns)
        return StepFigures(
            last_step=samples[-1].step if samples else 0,
            num_steps=len(samples),
            durations_ms=tuple(durations),
            p50_ms=spread.get("p50"),
            p99_ms=spread.get("p99"),
            shares=_shares(samples),
            steps_per_s=steps_per_s,
            prompt_tokens_per_s=prompt_tokens_per_s,
            output_tokens_per_s=output_tokens_per_s,
            requests_per_step=sum(s.num_requests for s in samples) / len(samples) if samples else 0.0,
            num_preempted=sum(s.num_preempted for s in samples),
            num_repeated=sum(s.is_repeat for s in samples),
            blocks_moved=sum(s.num_moved for s in samples),
            num_failed=sum(s.failed for s in samples),
            is_sampled=any(s.num_skipped for s in samples),
        )


def _rates(samples: Sequence[StepSample], now_ns: int) -> tuple[float, float, float]:
    """Steps, prompt and output tokens per second over the last 10 s; skipped steps are extrapolated from those read."""
    recent = [sample for sample in samples if sample.finished_ns > now_ns - _RATE_NS]
    if not recent:
        return 0.0, 0.0, 0.0
    reaches_back = len(recent) < len(samples)
    span_ns = _RATE_NS if reaches_back else max(_LEAST_RATE_NS, now_ns - recent[0].finished_ns)
    factor = (1 + sum(s.num_skipped for s in recent) / len(recent)) * _NS_PER_S / span_ns
    num_prompt, num_output = sum(s.prompt_tokens for s in recent), sum(s.output_tokens for s in recent)
    return len(recent) * factor, num_prompt * factor, num_output * factor


def _shares(samples: Sequence[StepSample]) -> dict[str, float]:
    sums = [sum(sample.parts_ms[i] for sample in samples) for i in range(len(PARTS))]
    whole = sum(sums)
    return {part: value / whole if whole else 0.0 for part, value in zip(PARTS, sums, strict=True)}
