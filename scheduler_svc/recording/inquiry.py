"""Answers for waits of the past: which knob, at which value, would have let a request in at its step, and one unit less not.

Also a program, for services that must not stop to answer: `python -m scheduler_svc.recording.inquiry FILE` reads questions as JSON
from standard input and writes as many answers to standard output.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording.file_format import Recording
from scheduler_svc.recording.needs import Needs, Value, find_needs
from scheduler_svc.recording.probe import StepProbe
from scheduler_svc.recording.ring import Segment
from svc_common.errors import ConfigError, QuireError


@dataclass(frozen=True, slots=True)
class Question:
    """A wait: the request (by its id in the core), which sample of it, the step that did not let it in, and why.

    `head_reason`: for one that stands behind another, what that one lacks; else "".
    """

    request_id: str
    sample: int
    step: int
    reason: str
    head_reason: str = ""


class StepTrial:
    """`needs.Trial` for one request in one step."""

    def __init__(self, probe: StepProbe, question: Question) -> None:
        self._probe = probe
        self._question = question
        self._core = probe.core()
        group = self._group()
        self._names = {sequence.name for sequence in group.sequences} if group is not None else set()

    def _group(self) -> Group | None:
        request = self._core.request(self._question.request_id)
        return request.groups[self._question.sample] if request is not None else None

    def value(self, key: str) -> Value | None:
        """What it was; None where the policy does not have it."""
        return _value(self._core, key)

    def most(self, key: str) -> int:
        """What all requests together could use."""
        requests = self._core.state.requests.values()
        limits = self._core.state.limits
        if key == "max_num_seqs":
            return limits.max_num_seqs + sum(r.num_samples for r in requests)
        if key == "max_loras":
            return len({r.lora_id for r in requests}) + 1
        longest = [
            min(s.num_prompt_tokens + r.stop.max_tokens, limits.max_model_len) for r in requests for s in r.unfinished
        ]
        if key == "max_num_batched_tokens":
            return limits.max_num_batched_tokens + sum(longest)
        num_blocks = sum(-(-tokens // limits.block_size) + 1 for tokens in longest)
        return limits.num_gpu_blocks + num_blocks + self._core.state.cache.watermark_blocks

    def lets_in(self, values: Mapping[str, Value]) -> bool:
        """Whether a plan of that step holds it."""
        try:
            plans = self._probe(values)
        except ConfigError:
            return False  # the values do not go together with others
        return any(entry.name in self._names for plan in plans for entry in plan.scheduled)


def _value(core: Scheduler, key: str) -> Value | None:
    if key == "watermark_blocks":
        return core.state.cache.watermark_blocks or None
    if key == "delay_factor":
        return core.spec.delay_factor or None
    owner = core.spec if key == "max_loras" else core.state.limits
    value: Value | None = getattr(owner, key)
    return value


def answer(segments: Sequence[Segment], questions: Iterable[Question]) -> list[Needs]:
    """For each question what would have done; empty where nothing would, or the segments do not hold the step."""
    probes: dict[int, StepProbe | None] = {}
    return [_answer(segments, question, probes) for question in questions]


def _answer(segments: Sequence[Segment], question: Question, probes: dict[int, StepProbe | None]) -> Needs:
    if question.step not in probes:
        try:
            probes[question.step] = StepProbe(segments, question.step)
        except QuireError:
            probes[question.step] = None
    probe = probes[question.step]
    if probe is None:
        return {}
    return find_needs(StepTrial(probe, question), Reason(question.reason), question.head_reason)


def main(path: str) -> None:
    """The program."""
    questions = [Question(**values) for values in json.load(sys.stdin)]
    json.dump(answer(list(Recording(Path(path)).segments()), questions), sys.stdout)


def as_json(questions: Iterable[Question]) -> str:
    """Questions as the program reads them."""
    return json.dumps([asdict(question) for question in questions])


if __name__ == "__main__":
    main(sys.argv[1])
