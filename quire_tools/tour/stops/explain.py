"""The stop `explain`: why a request waited and was preempted and resumed, by `quire why` and by its trace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from quire.client.sampling_params import SamplingParams
from quire.local_stack.otlp_receiver import OtlpReceiver, ReceivedEvent, ReceivedSpan, ReceivedTrace
from quire_tools.tour import arrivals, step_facts
from quire_tools.tour.pictures import Step
from quire_tools.tour.screen import Check, Number, Screen, Stop
from quire_tools.tour.stage import Stage, TourRequest
from svc_common import trace_names as names

SUBJECT = "T"
"""The request that is explained; the others compete with it."""
_OTHERS = {"A": (48, 48), "B": (48, 60), "C": (16, 8)}
"""Tokens of prompt and output."""
_SERVICES = ("quire-gateway", "quire-scheduler", "quire-worker")
_TRACE_TIMEOUT_S = 20.0
_BAR = 34
_LABEL = 40
_OPTIONS: Mapping[str, Any] = {
    "policy": "vllm-v0-chunked",
    "max_num_seqs": 3,
    "max_num_batched_tokens": 64,
    "policy_set": ("prefix_caching=false", "watermark_blocks=1"),
    "worker_args": ("--dtype", "float32", "--max-model-len", "224", "--num-gpu-blocks-override", "16"),
}


@dataclass(frozen=True, slots=True)
class Told:
    """A reason to wait, from the timeline or from the trace: the step that found it, its code and its numbers."""

    step: int
    reason: str
    numbers: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The numbers in one line."""
        return " ".join(f"{name}={value}" for name, value in self.numbers.items())


@dataclass(frozen=True, slots=True)
class Course:
    """The subject's steps, timeline and trace."""

    steps: Sequence[Step]
    timeline: Mapping[str, Any]
    trace: ReceivedTrace

    @property
    def by_why(self) -> list[Told]:
        """The subject's waits by `quire why`."""
        waits = [episode for episode in self.timeline["episodes"] if episode["queue"] in ("waiting", "swapped")]
        return [Told(episode["from_step"], episode["reason"], episode["numbers"]) for episode in waits]

    @property
    def by_trace(self) -> list[Told]:
        """The subject's waits by its spans' events; names in capitals are reasons."""
        told = [event for span in self.of_scheduler for event in span.events if event.name.isupper()]
        return [_told(event) for event in sorted(told, key=lambda event: event.time_ns)]

    @property
    def of_scheduler(self) -> list[ReceivedSpan]:
        """The scheduler's spans of the subject, one per phase."""
        return [span for span in self.trace.spans if span.name.startswith("scheduler.")]

    @property
    def chunks_of_trace(self) -> list[tuple[int, int, int]]:
        """(step, tokens computed before, tokens) of each prefill chunk, by the trace."""
        events = [event.attributes for span in self.of_scheduler for event in span.events if event.name == names.CHUNK]
        return [(of[names.STEP], of[names.COMPUTED_BEFORE], of[names.TOKENS]) for of in events]

    @property
    def chunks_of_steps(self) -> list[tuple[int, int, int]]:
        """(step, tokens computed before, tokens) of each prefill chunk, by `quire steps`."""
        found = step_facts.shares(self.steps, SUBJECT)
        return [(number, group["computed_before"], group["tokens"]) for number, group in found if group["prefill"]]


def show(stage: Stage) -> Screen:
    """Four requests, at most three at a time, with too few blocks."""
    with stage.stack(traced=True, **_OPTIONS) as stack:
        asks = [_request(name, *sizes) for name, sizes in {**_OTHERS, SUBJECT: (90, 50)}.items()]
        arrivals.one_by_one(stack, asks)
        steps, timeline = stack.steps(), stack.why(SUBJECT)
        trace = _trace_of(stack.records, SUBJECT)
    course = Course(steps, timeline, trace)
    return Screen(
        "Why did it wait? `quire why` and the trace give the same answer",
        ("R12", "R60", "R77", "R87", "R98"),
        [
            f"Request {SUBJECT} under vllm-v0-chunked: its trace over {len(trace.services)} services, then why it waited by both.",
            _span_table(course),
            Text(),
            _wait_table(course),
        ],
        _checks(course),
        _numbers(course),
    )


def _request(name: str, num_prompt: int, num_output: int) -> TourRequest:
    prompt = [100 + 60 * ord(name) % 2_000 + place for place in range(num_prompt)]
    return TourRequest(name, prompt, SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True))


def _told(event: ReceivedEvent) -> Told:
    own = {names.STEP, names.WAITING_QUEUE, names.SAMPLE}
    numbers = {name.removeprefix(names.PREFIX): value for name, value in event.attributes.items() if name not in own}
    return Told(int(event.attributes.get(names.STEP, 0)), event.name, numbers)


# --- the trace -----------------------------------------------------------------------------------------------------


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


# --- what is shown -------------------------------------------------------------------------------------------------


def _span_table(course: Course) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("span", "ms", "steps", "when"):
        table.add_column(name, no_wrap=True, justify="right" if name == "ms" else "left")
    start_ns = min(span.start_ns for span in course.trace.spans)
    length_ns = max(span.end_ns for span in course.trace.spans) - start_ns
    for depth, span in course.trace.walk():
        begin = round(_BAR * (span.start_ns - start_ns) / length_ns)
        width = max(1, round(_BAR * (span.end_ns - span.start_ns) / length_ns))
        first, last = (span.attributes.get(name, "") for name in (names.FIRST_STEP, names.LAST_STEP))
        label = f"{'  ' * depth}{span.service.removeprefix('quire-')} {span.name}"
        bar = Text(" " * begin + "█" * width, style=_style(span))
        table.add_row(label[:_LABEL], f"{1e3 * span.duration_s:.1f}", f"{first}..{last}" if last else "", bar)
    return table


def _style(span: ReceivedSpan) -> str:
    return {names.QUEUE: "yellow", names.REQUEUED: "red", names.PREFILL: "cyan"}.get(span.name, "green")


def _wait_table(course: Course) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("step", "reason", "numbers by `quire why`", "numbers by the trace", ""):
        table.add_column(name, no_wrap=True)
    missing = Told(0, "nothing", {})
    count = max(len(course.by_why), len(course.by_trace))
    for place in range(count):
        one, other = (rows[place] if place < len(rows) else missing for rows in (course.by_why, course.by_trace))
        same = Text("equal", style="green") if _same(one, other) else Text("different", style="bold red")
        theirs = other.text if other.reason == one.reason else f"{other.reason} {other.text}"
        table.add_row(str(one.step), one.reason, one.text, theirs, same)
    return table


def _same(one: Told, other: Told) -> bool:
    return (one.step, one.reason, dict(one.numbers)) == (other.step, other.reason, dict(other.numbers))


def _numbers(course: Course) -> list[Number]:
    steps = step_facts.about(course.steps, [SUBJECT])
    return [
        Number("first step that it ran in", next(step_facts.shares(steps, SUBJECT))[0], "R98"),
        Number("pieces that it was computed in", len(course.chunks_of_steps), "R87"),
        Number("tokens lost when it had to leave", _num_lost(course), "R77"),
        Number("times it had to leave", sum(one.name == SUBJECT for one in step_facts.leavings(steps)), "R60"),
        Number("spans of its trace", len(course.trace.spans), "R12"),
        Number("reasons to wait", len(course.by_why), "R12"),
    ]


def _num_lost(course: Course) -> int:
    return sum(told.numbers["lost_tokens"] for told in course.by_why if told.reason == "PREEMPTED")


# --- checks --------------------------------------------------------------------------------------------------------


def _checks(course: Course) -> list[Check]:
    reasons = [told.reason for told in course.by_why]
    pairs = list(zip(course.by_why, course.by_trace, strict=False))
    equal = len(course.by_why) == len(course.by_trace) and all(_same(*pair) for pair in pairs)
    left = [one for one in step_facts.leavings(course.steps) if one.name == SUBJECT]
    told = [wait.step for wait in course.by_why if wait.reason == "PREEMPTED"]
    roots = [span.name for span in course.trace.roots]
    return [
        Check("each reason is an event of the trace", equal, f"{len(pairs)} reasons, number for number"),
        Check(
            "it waited, had to leave, and waited for blocks",
            {"MAX_SEQS", "PREEMPTED", "NEED_BLOCKS"} <= set(reasons),
            f"{len(set(reasons))} kinds of reasons",
        ),
        Check(
            "so do the steps say that it left",
            bool(left) and [one.step for one in left] == told,
            f"in step {', '.join(map(str, told))}",
        ),
        Check("a need of blocks is more than is free", *_short(course)),
        Check("what it lost is what was computed", *_lost(course)),
        Check(
            "the trace's chunks are those of `quire steps`",
            len(course.chunks_of_steps) > 1 and course.chunks_of_trace == course.chunks_of_steps,
            " ".join(f"{before}+{tokens}" for _, before, tokens in course.chunks_of_steps),
        ),
        Check("one root, no orphan, three services", *_whole(course, roots)),
    ]


def _short(course: Course) -> tuple[bool, str]:
    """Check that each reported shortage was real: taking the blocks would have gone below the watermark."""
    told = [wait.numbers for wait in course.by_why if wait.reason == "NEED_BLOCKS"]
    true = [numbers for numbers in told if numbers["free"] - numbers["need"] < numbers["watermark"]]
    return bool(told) and true == told, ", ".join(f"{n['need']} of {n['free']}" for n in told)


def _lost(course: Course) -> tuple[bool, str]:
    lost = _num_lost(course)
    computed = sum(
        step_facts.num_computed(course.steps, SUBJECT, told.step)
        for told in course.by_why
        if told.reason == "PREEMPTED"
    )
    return lost == computed > 0, f"{lost} tokens"


def _whole(course: Course, roots: Sequence[str]) -> tuple[bool, str]:
    orphans = [root for root in course.trace.roots if root.parent_id]
    return len(roots) == 1 and not orphans and course.trace.services == _SERVICES, ", ".join(roots)


STOP = Stop(
    "explain", "Why a request waited: `quire why` beside the trace of the same request.", ("R12", "R60", "R87"), show
)
