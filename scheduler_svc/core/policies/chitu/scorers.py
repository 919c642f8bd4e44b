"""Chitu's scorers: the task order that a `scheduler_type` stands for, and which task types may run.

Scores are integers, larger = sooner, whereas keys of `Ordering` are smaller = sooner; times are in nanoseconds.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from scheduler_svc.core.request import Group

NS_PER_S = 1_000_000_000
PREFILL_ONLY, DECODE_ONLY = "prefill_only", "decode_only"

_NS_PER_TOKEN = 1_000_000
_EXPECTED_OUTPUT = 1024

Scorer = Callable[[Group, int], int]


def nanoseconds(seconds: float) -> int:
    """A time in seconds as whole nanoseconds; exact for clocks that started within the last hundred days."""
    return round(seconds * NS_PER_S)


def fcfs(group: Group, now_ns: int) -> int:
    """Earliest arrival first."""
    return -nanoseconds(group.request.arrival_time)


def prefill_first(group: Group, now_ns: int) -> int:
    """Prefills, recomputation included, before decodes."""
    return int(group.in_prefill)


def request_preset(group: Group, now_ns: int) -> int:
    """The request's priority, negated because the core's is smaller = sooner."""
    return -group.request.priority


def stride(group: Group, now_ns: int) -> int:
    """Priority times age; the age is never reset."""
    return request_preset(group, now_ns) * (now_ns - nanoseconds(group.request.arrival_time))


def deadline(group: Group, now_ns: int) -> int:
    """Earliest deadline first: arrival plus 1 ms per prompt token and per token of an expected output of 1,024."""
    num_tokens = len(group.request.prompt_token_ids) + _EXPECTED_OUTPUT
    return -(nanoseconds(group.request.arrival_time) + _NS_PER_TOKEN * num_tokens)


def prefix_align(group: Group, now_ns: int) -> int:
    """Shortest sequence first, generated tokens included."""
    return -max(sequence.num_tokens for sequence in group.live)


SCORERS: dict[str, Scorer] = {
    "fcfs": fcfs,
    "fifo": fcfs,
    "prefill_first": prefill_first,
    "request_preset": request_preset,
    "stride": stride,
    "deadline": deadline,
    "prefix_align": prefix_align,
    PREFILL_ONLY: prefill_first,
    DECODE_ONLY: fcfs,
}
_WARM_UP = (prefill_first,)


def words_of(scheduler_type: str) -> list[str]:
    """The comma-separated words of a type; case, blanks and empty words are ignored. No word at all means fcfs."""
    return [word for part in scheduler_type.split(",") if (word := part.strip().lower())] or ["fcfs"]


def unknown_words(scheduler_type: str) -> list[str]:
    """Words that name no scorer."""
    return [word for word in words_of(scheduler_type) if word not in SCORERS]


@dataclass(frozen=True, slots=True)
class TaskOrder:
    """Orders tasks, which are groups. `only`: the one strict mode in the type, None = both task types run.

    `returns_evicted`: decode_only also recomputes the tasks it preempted, although that is a prefill.
    """

    scorers: tuple[Scorer, ...]
    only: str | None
    returns_evicted: bool = False

    @classmethod
    def of(cls, scheduler_type: str, *, returns_evicted: bool = False) -> "TaskOrder":
        """The order of a type without unknown words."""
        words = words_of(scheduler_type)
        strict = [mode for mode in (PREFILL_ONLY, DECODE_ONLY) if mode in words]
        only = strict[0] if len(strict) == 1 else None
        return cls(tuple(SCORERS[word] for word in words), only, returns_evicted)

    def admits(self, group: Group) -> bool:
        """Whether tasks of this task's type run."""
        if self.only is None:
            return True
        if self.only == PREFILL_ONLY:
            return group.in_prefill
        return not group.in_prefill or (self.returns_evicted and group.live[0].num_output_tokens > 0)

    def ranked(self, groups: Iterable[Group], now: float, *, is_warming_up: bool = False) -> list[Group]:
        """Tasks by score, best first; ties keep their order. `now`: seconds. During warm-up prefills come first
        and no other scorer counts.
        """
        now_ns = nanoseconds(now)
        scorers = _WARM_UP if is_warming_up else self.scorers
        return sorted(groups, key=lambda group: tuple(-score(group, now_ns) for score in scorers))
