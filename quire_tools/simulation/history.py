"""Record of a simulation: times and tokens per request, columns of shape and duration per step, and summary figures."""

from array import array
from dataclasses import dataclass, field
from math import nan

from quire_tools.simulation.cost_model import StepShape
from scheduler_svc.core.plan import EndedSequence, StepPlan
from scheduler_svc.core.request import Request, SequenceStatus
from svc_common.percentiles import percentiles

_ENDS = {
    SequenceStatus.FINISHED_STOPPED: "stop",
    SequenceStatus.FINISHED_LENGTH_CAPPED: "length",
    SequenceStatus.FINISHED_ABORTED: "abort",
    SequenceStatus.FINISHED_IGNORED: "ignored",
}


@dataclass(slots=True)
class RequestHistory:
    """One request. Times are seconds of virtual time, None = did not happen.

    `token_times_s`: of all output tokens of all its sequences. `admitted_steps`: steps in which it was sent
    to the worker anew (started, or started again). `num_lost_tokens`: recomputed tokens, because their blocks
    were given away. `end`: "stop", "length", "abort", "ignored", "failed", "deadline" or "refused"; None = it
    had not ended when the simulation did.
    """

    request: Request
    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    first_token_step: int | None = None
    end_s: float | None = None
    end_step: int | None = None
    end: str | None = None
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    num_lost_tokens: int = 0
    num_cached_tokens: int = 0
    admitted_steps: list[int] = field(default_factory=list)
    token_times_s: "array[float]" = field(default_factory=lambda: array("d"))

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from the arrival."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None with fewer than two tokens."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def is_done(self) -> bool:
        """True if it ended naturally, with its whole output."""
        return self.end in ("stop", "length")


def end_of(ended: EndedSequence) -> str:
    """How the sequence ended, in the words of `RequestHistory.end`."""
    failed = ended.error is not None and ended.status is SequenceStatus.FINISHED_ABORTED
    return "failed" if failed else _ENDS[ended.status]


@dataclass(slots=True)
class StepColumns:
    """One value per step with work, in order of completion; `duration_s` at the worker."""

    step: "array[int]" = field(default_factory=lambda: array("q"))
    lane: "array[int]" = field(default_factory=lambda: array("q"))
    duration_s: "array[float]" = field(default_factory=lambda: array("d"))
    num_prefill_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    num_decode_seqs: "array[int]" = field(default_factory=lambda: array("q"))
    num_context_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    num_pairs: "array[int]" = field(default_factory=lambda: array("q"))
    num_moved_blocks: "array[int]" = field(default_factory=lambda: array("q"))
    num_running: "array[int]" = field(default_factory=lambda: array("q"))
    num_waiting: "array[int]" = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.step)

    def add(self, plan: StepPlan, shape: StepShape, duration_s: float) -> None:
        """Append a completed step."""
        self.step.append(plan.step)
        self.lane.append(plan.lane)
        self.duration_s.append(duration_s)
        self.num_prefill_tokens.append(shape.num_prefill_tokens)
        self.num_decode_seqs.append(shape.num_decode_seqs)
        self.num_context_tokens.append(shape.num_context_tokens)
        self.num_pairs.append(shape.num_pairs)
        self.num_moved_blocks.append(shape.num_moved_blocks)
        self.num_running.append(plan.num_running)
        self.num_waiting.append(plan.num_waiting)


@dataclass(frozen=True, slots=True)
class Figures:
    """Summary of a history. Latencies in seconds; quantiles over requests that got that far (`nan` if none did).

    `num_lost_tokens` of `num_computed_tokens` were recomputed. `throughput`: output tokens of done requests
    per second, from the first arrival to the last end. `fairness`: Jain's index of the requests' time per
    token, 1 = all equal. `num_censored`: requests that had not ended when the simulation did.
    """

    num_requests: int
    num_done: int
    num_censored: int
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    throughput: float
    duration_s: float
    num_steps: int
    num_preemptions: int
    num_computed_tokens: int
    num_lost_tokens: int
    fairness: float


@dataclass(slots=True)
class SimulationHistory:
    """A whole run. `requests`: by id in order of arrival; `has_stalled`: requests were left that could not make progress."""

    requests: dict[str, RequestHistory] = field(default_factory=dict)
    steps: StepColumns = field(default_factory=StepColumns)
    start_s: float = 0.0
    end_s: float = 0.0
    num_repeated_results: int = 0
    has_stalled: bool = False

    def figures(self) -> Figures:
        """Summary over all requests."""
        requests = list(self.requests.values())
        done = [r for r in requests if r.is_done]
        ttft = percentiles([r.ttft_s for r in requests if r.ttft_s is not None])
        tpot = percentiles([r.tpot_s for r in requests if r.tpot_s is not None])
        first = min((r.arrival_s for r in requests), default=self.start_s)
        duration_s = max((r.end_s for r in requests if r.end_s is not None), default=first) - first
        return Figures(
            num_requests=len(requests),
            num_done=len(done),
            num_censored=sum(r.end is None for r in requests),
            ttft_p50_s=ttft.get("p50", nan),
            ttft_p99_s=ttft.get("p99", nan),
            tpot_p50_s=tpot.get("p50", nan),
            tpot_p99_s=tpot.get("p99", nan),
            throughput=sum(len(r.token_times_s) for r in done) / duration_s if duration_s > 0 else 0.0,
            duration_s=duration_s,
            num_steps=len(self.steps),
            num_preemptions=sum(r.num_preemptions for r in requests),
            num_computed_tokens=sum(r.num_computed_tokens for r in requests),
            num_lost_tokens=sum(r.num_lost_tokens for r in requests),
            fairness=_jain([_slowness(r) for r in done]),
        )


def _slowness(r: RequestHistory) -> float:
    """Seconds from arrival to end per token of prompt and output."""
    end_s = r.arrival_s if r.end_s is None else r.end_s
    return (end_s - r.arrival_s) / (len(r.request.prompt_token_ids) + len(r.token_times_s))


def _jain(values: list[float]) -> float:
    squares = sum(v * v for v in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0
