"""The stop `explain`: why a request waited and was preempted and resumed, by `quire why` and by its trace."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.text import Text

from quire.local_stack.otlp_receiver import OtlpReceiver, ReceivedEvent, ReceivedSpan, ReceivedTrace
from quire_tools.tour import arrivals, pictures, step_facts
from quire_tools.tour.pictures import Step
from quire_tools.tour.scenario import request, tiny_worker
from quire_tools.tour.screen import Check, Number, declared
from quire_tools.tour.stage import Stage
from svc_common.observability import trace_names as names

_SUBJECT = "T"
"""The request that is explained; the others compete with it."""
_SIZES = {"A": (48, 48), "B": (48, 60), "C": (16, 8), _SUBJECT: (90, 50)}
"""Tokens of prompt and output."""
_SERVICES = ("quire-gateway", "quire-scheduler", "quire-worker")
_TRACE_TIMEOUT_S = 20.0
_BAR, _LABEL = 34, 40
_STYLES = {names.QUEUE: "yellow", names.REQUEUED: "red", names.PREFILL: "cyan"}
_OPTIONS: dict[str, Any] = {
    "policy": "vllm-v0-chunked",
    "max_num_seqs": 3,
    "max_num_batched_tokens": 64,
    "policy_set": ("prefix_caching=false", "watermark_blocks=1"),
    "worker_args": tiny_worker(224, 16),
}


class WaitReason(NamedTuple):
    """A reason to wait, from the timeline or from the trace: the step that found it, its code and its numbers."""

    step: int = 0
    reason: str = "nothing"
    numbers: Mapping[str, Any] = {}

    @property
    def text(self) -> str:
        """The numbers in one line."""
        return " ".join(f"{name}={value}" for name, value in self.numbers.items())


@dataclass(frozen=True, slots=True)
class ExplainedRequest:
    """All steps; the subject's timeline and trace."""

    steps: Sequence[Step]
    timeline: Mapping[str, Any]
    trace: ReceivedTrace

    @property
    def by_why(self) -> list[WaitReason]:
        """The subject's waits by `quire why`."""
        waits = [episode for episode in self.timeline["episodes"] if episode["queue"] in ("waiting", "swapped")]
        return [WaitReason(episode["from_step"], episode["reason"], dict(episode["numbers"])) for episode in waits]

    @property
    def by_trace(self) -> list[WaitReason]:
        """The subject's waits by its spans' events; names in capitals are reasons."""
        told = [event for event in self.events if event.name.isupper()]
        return [_reason(event) for event in sorted(told, key=lambda event: event.time_ns)]

    @property
    def events(self) -> list[ReceivedEvent]:
        """Events of the scheduler's spans of the subject, one span per phase."""
        spans = [span for span in self.trace.spans if span.name.startswith("scheduler.")]
        return [event for span in spans for event in span.events]

    @property
    def chunks_of_trace(self) -> list[tuple[int, int, int]]:
        """(step, tokens computed before, tokens) of each prefill chunk, by the trace."""
        found = [event.attributes for event in self.events if event.name == names.CHUNK]
        return [(of[names.STEP], of[names.COMPUTED_BEFORE], of[names.TOKENS]) for of in found]

    @property
    def chunks_of_steps(self) -> list[tuple[int, int, int]]:
        """(step, tokens computed before, tokens) of each prefill chunk, by `quire steps`."""
        found = step_facts.shares(self.steps, _SUBJECT)
        return [(number, group["computed_before"], group["tokens"]) for number, group in found if group["prefill"]]

    @property
    def preempted_in(self) -> list[int]:
        """Steps that preempted the subject."""
        return [one.step for one in step_facts.preemptions(self.steps) if one.name == _SUBJECT]

    def told(self, reason: str) -> list[WaitReason]:
        """Waits with this reason by `quire why`."""
        return [wait for wait in self.by_why if wait.reason == reason]

    @property
    def num_lost(self) -> int:
        """Computed tokens that preemptions lost, by `quire why`."""
        return sum(wait.numbers["lost_tokens"] for wait in self.told("PREEMPTED"))


def _observe(stage: Stage) -> ExplainedRequest:
    """Four requests, at most three at a time, with too few blocks."""
    with stage.stack(traced=True, **_OPTIONS) as stack:
        arrivals.one_by_one(stack, [request(name, *sizes) for name, sizes in _SIZES.items()])
        return ExplainedRequest(stack.steps(), stack.why(_SUBJECT), _trace_of(stack.records, _SUBJECT))


def _trace_of(records: OtlpReceiver, request_id: str) -> ReceivedTrace:
    """The complete trace: spans of all services, and no span without its parent."""
    records.wait(lambda spans: _is_complete(spans, request_id), timeout_s=_TRACE_TIMEOUT_S)
    return records.traces()[_trace_id(records.spans(), request_id)]


def _is_complete(spans: Sequence[ReceivedSpan], request_id: str) -> bool:
    trace_id = _trace_id(spans, request_id)
    mine = [span for span in spans if span.trace_id == trace_id]
    known = {span.span_id for span in mine}
    parents = all(span.parent_id in known for span in mine if span.parent_id)
    return parents and {span.service for span in mine} == set(_SERVICES)


def _trace_id(spans: Sequence[ReceivedSpan], request_id: str) -> str:
    mine = (span.trace_id for span in spans if span.attributes.get(names.REQUEST_ID) == request_id)
    return next(mine, "")


def _reason(event: ReceivedEvent) -> WaitReason:
    own = {names.STEP, names.WAITING_QUEUE, names.SAMPLE}
    numbers = {name.removeprefix(names.PREFIX): value for name, value in event.attributes.items() if name not in own}
    return WaitReason(int(event.attributes.get(names.STEP, 0)), event.name, numbers)


def _picture(seen: ExplainedRequest) -> Iterator[RenderableType]:
    start_ns = min(span.start_ns for span in seen.trace.spans)
    column_ns = (max(span.end_ns for span in seen.trace.spans) - start_ns) / _BAR
    spans = pictures.table(
        ("span", "ms", "steps", "when"), [_span_row(*one, start_ns, column_ns) for one in seen.trace.walk()]
    )
    spans.columns[1].justify = "right"
    yield spans
    yield Text()
    missing = [WaitReason()] * abs(len(seen.by_why) - len(seen.by_trace))
    pairs = zip([*seen.by_why, *missing], [*seen.by_trace, *missing], strict=False)
    yield pictures.table(
        ("step", "reason", "numbers by `quire why`", "numbers by the trace", ""),
        [_wait_row(*pair) for pair in pairs if pair != (WaitReason(), WaitReason())],
        gap=1,
    )


def _span_row(depth: int, span: ReceivedSpan, start_ns: int, column_ns: float) -> list[RenderableType]:
    first, last = (span.attributes.get(name, "") for name in (names.FIRST_STEP, names.LAST_STEP))
    label = f"{'  ' * depth}{span.service.removeprefix('quire-')} {span.name}"
    line = " " * round((span.start_ns - start_ns) / column_ns)
    line += "█" * max(1, round((span.end_ns - span.start_ns) / column_ns))
    bar = Text(line, style=_STYLES.get(span.name, "green"))
    return [label[:_LABEL], f"{1e3 * span.duration_s:.1f}", f"{first}..{last}" if last else "", bar]


def _wait_row(one: WaitReason, other: WaitReason) -> list[RenderableType]:
    same = Text("equal", style="green") if one == other else Text("different", style="bold red")
    theirs = other.text if other.reason == one.reason else f"{other.reason} {other.text}"
    return [str(one.step), one.reason, one.text, theirs, same]


def _numbers(seen: ExplainedRequest) -> list[Number]:
    return [
        Number("first step that it ran in", next(step_facts.shares(seen.steps, _SUBJECT))[0]),
        Number("prefill chunks", len(seen.chunks_of_steps)),
        Number("tokens lost by preemption", seen.num_lost),
        Number("preemptions", len(seen.preempted_in)),
        Number("spans of its trace", len(seen.trace.spans)),
        Number("reasons to wait", len(seen.by_why)),
    ]


def _checks(seen: ExplainedRequest) -> list[Check]:
    reasons = {wait.reason for wait in seen.by_why}
    needs = [wait.numbers for wait in seen.told("NEED_BLOCKS")]
    preempted = [wait.step for wait in seen.told("PREEMPTED")]
    computed = sum(step_facts.num_computed(seen.steps, _SUBJECT, step) for step in preempted)
    roots = seen.trace.roots
    return [
        Check(
            "each reason is an event of the trace",
            seen.by_why == seen.by_trace,
            f"{min(len(seen.by_why), len(seen.by_trace))} reasons, number for number",
        ),
        Check(
            "it waited, was preempted, and waited for blocks",
            {"MAX_SEQS", "PREEMPTED", "NEED_BLOCKS"} <= reasons,
            f"{len(reasons)} kinds of reasons",
        ),
        Check(
            "the steps agree that it was preempted",
            bool(preempted) and seen.preempted_in == preempted,
            f"in step {', '.join(map(str, preempted))}",
        ),
        Check(
            "taking the blocks would have passed the watermark",
            bool(needs) and all(of["free"] - of["need"] < of["watermark"] for of in needs),
            ", ".join(f"{of['need']} of {of['free']}" for of in needs),
        ),
        Check("it lost what had been computed", seen.num_lost == computed > 0, f"{seen.num_lost} tokens"),
        Check(
            "the trace's chunks are those of `quire steps`",
            len(seen.chunks_of_steps) > 1 and seen.chunks_of_trace == seen.chunks_of_steps,
            " ".join(f"{before}+{tokens}" for _, before, tokens in seen.chunks_of_steps),
        ),
        Check(
            "one root, no orphan, three services",
            len(roots) == 1 and not roots[0].parent_id and seen.trace.services == _SERVICES,
            ", ".join(root.name for root in roots),
        ),
    ]


STOP = declared(
    "explain",
    "Why a request waited: `quire why` beside the trace of the same request.",
    "docs/explaining.md",
    title="Why did it wait? `quire why` and the trace give the same answer",
    text=f"Request {_SUBJECT} under vllm-v0-chunked: its trace over {len(_SERVICES)} services, then why it waited by both.",
    observe=_observe,
    picture=_picture,
    checks=_checks,
    numbers=_numbers,
)
