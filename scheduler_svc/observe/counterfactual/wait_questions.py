"""Counterfactual answers for past waits: which policy key, at which value, would have let a request in, with one unit less failing.

Also a program, for services that must not stop to answer: `python -m scheduler_svc.observe.counterfactual.wait_questions
FILE` reads rounds of questions as JSON from standard input and writes a line of JSON for each answer when it
is found: [index among all questions, values]. Each round is one replay, in the order of steps.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import QueueKind
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.spec.policy_spec import knob_names
from scheduler_svc.observe.counterfactual.past_step import PastStep
from scheduler_svc.observe.counterfactual.search import Counterfactual, Value, find_counterfactual
from scheduler_svc.observe.recording.file_format import Recording
from scheduler_svc.observe.recording.segment_buffer import RecordingSegment
from svc_common.errors import ConfigError, QuireError


@dataclass(frozen=True, slots=True)
class WaitQuestion:
    """A wait: the request (by its id in the core), its sample, the step that did not let it in, and the reason.

    `head_reason`: for a request behind the head of line, the head's reason; else "".
    """

    request_id: str
    sample: int
    step: int
    reason: str
    head_reason: str = ""


class WaitReplanning:
    """`Replanning` for one request in one step. `forks`: run each try in a forked child; the process must be single-threaded."""

    def __init__(self, past: PastStep, question: WaitQuestion, *, forks: bool) -> None:
        self._past = past
        self._question = question
        self._forks = forks
        self._core = past.core()

    def value(self, key: str) -> Value | None:
        """The recorded value; None if the policy does not have the key."""
        return _value(self._core, key)

    def most(self, key: str) -> Value:
        """What all requests together could use."""
        requests = self._core.state.requests.values()
        limits = self._core.limits
        if key in ("max_num_seqs", "max_reqs"):
            return limits.max_num_seqs + sum(r.num_samples for r in requests)
        if key == "max_loras":
            return len({r.lora_id for r in requests}) + 1
        longest = [
            min(s.num_prompt_tokens + r.stop.max_tokens, limits.max_model_len) for r in requests for s in r.unfinished
        ]
        most_tokens = limits.max_num_batched_tokens + sum(longest)
        if key == "chunk_s":
            return self._core.spec.chunk_s + self._core.state.costs.now.compute_s(most_tokens)
        if key in ("max_num_batched_tokens", "prefill_chunk_size"):
            return most_tokens
        cache = self._core.state.cache
        num_blocks = sum(cache.ledger.most_blocks(tokens) + cache.ledger.num_groups for tokens in longest)
        return limits.num_gpu_blocks + num_blocks + cache.watermark_blocks

    def lets_in(self, values: Mapping[str, Value]) -> bool:
        """True if a plan of that step starts or resumes the request."""
        if self._forks:
            return _in_child(lambda: self._starts(self._core, values))
        return self._starts(self._past.core(), values)

    def _starts(self, core: Scheduler, values: Mapping[str, Value]) -> bool:
        try:
            plans = self._past.plan(core, values)
        except ConfigError:
            return False  # the values contradict others
        asked = self._question.request_id, self._question.sample
        events = [e for plan in plans for e in plan.events if (e.request_id, e.sample) == asked]
        return any(e.reason is Reason.RUNNING for e in events) and events[-1].queue == QueueKind.RUNNING.value


def _in_child(question: Callable[[], bool]) -> bool:
    """Run `question` in a forked child, which leaves this process unchanged; far cheaper than restoring the core."""
    child = os.fork()
    if not child:
        status = 2
        try:
            status = 0 if question() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _value(core: Scheduler, key: str) -> Value | None:
    if key == "watermark_blocks":
        return core.state.cache.watermark_blocks or None
    if key in ("delay_factor", "chunk_s"):
        return float(getattr(core.spec, key)) or None
    owner = core.spec if key in knob_names() else core.limits
    value: Value | None = getattr(owner, key)
    return value


def answers(
    segments: Sequence[RecordingSegment], questions: Sequence[WaitQuestion], *, forks: bool = False
) -> Iterator[tuple[int, Counterfactual]]:
    """Answers as (index of the question, values), step by step.

    Values are empty if none would suffice, or if the segments do not have the step. `forks`: as in
    `WaitReplanning`.
    """
    for step, past in PastStep.at_each(segments, (question.step for question in questions)):
        for i, question in enumerate(questions):
            if question.step == step:
                yield i, {} if isinstance(past, QuireError) else _answer(past, question, forks=forks)


def answer(segments: Sequence[RecordingSegment], questions: Sequence[WaitQuestion]) -> list[Counterfactual]:
    """All answers, in the order of the questions."""
    found = dict(answers(segments, questions))
    return [found[i] for i in range(len(questions))]


def _answer(past: PastStep, question: WaitQuestion, *, forks: bool) -> Counterfactual:
    return find_counterfactual(
        WaitReplanning(past, question, forks=forks), Reason(question.reason), question.head_reason
    )


def main(path: str) -> None:
    """Run the program on a recording file."""
    segments, first = list(Recording(Path(path)).segments()), 0
    for values in json.load(sys.stdin):
        questions = [WaitQuestion(**value) for value in values]
        for number, found in answers(segments, questions, forks=True):
            sys.stdout.write(json.dumps([first + number, found]) + "\n")
            sys.stdout.flush()
        first += len(questions)


def as_json(rounds: Iterable[Sequence[WaitQuestion]]) -> str:
    """Rounds of questions in the program's input format."""
    return json.dumps([[asdict(question) for question in questions] for questions in rounds])


if __name__ == "__main__":
    main(sys.argv[1])
