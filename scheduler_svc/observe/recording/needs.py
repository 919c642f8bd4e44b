"""What would have ended a wait: the knobs and their smallest values that let a request in at a step, found by trying.

No formula: a step is planned again with other values (`Trial`), so what is found is true for all that stands before the request
as well - and one unit less was tried and does not do.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from scheduler_svc.core.reasons import KEYS, Reason

Value = int | float
Needs = dict[str, Value]

RISING = (
    "num_gpu_blocks",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_loras",
    "num_cpu_blocks",
    "max_reqs",
    "prefill_chunk_size",
)
"""More of these lets in more."""
FALLING = ("watermark_blocks", "delay_factor")
"""Less of these lets in more; 0 is least."""
_RESOLUTION = 2.0**-20


class Trial(Protocol):
    """One step of the past that can be planned again."""

    def value(self, key: str) -> Value | None:
        """What the key's value was; None where the policy has no such key, or no limit by it."""

    def most(self, key: str) -> int:
        """More of that rising key than anybody could use in this step."""

    def lets_in(self, values: Mapping[str, Value]) -> bool:
        """Whether the request runs after that step when it is planned with these values."""


def find_needs(trial: Trial, reason: Reason, head_reason: str = "") -> Needs:
    """The smallest values that let the request in; empty where no value of any key does (a result is pending, a type waits).

    One key where one is enough, the reason's own first; else as few as can be found. Of a falling key the largest value.
    """
    if trial.lets_in({}):
        return {}  # it was let in
    keys = [key for key in _keys(reason, head_reason) if trial.value(key) is not None]
    for key in keys:
        if trial.lets_in({key: _generous(trial, key)}):
            return {key: _boundary(trial, key, {}, _generous(trial, key))}
    return _together(trial, keys)


def _keys(reason: Reason, head_reason: str) -> Iterator[str]:
    own = KEYS.get(Reason(head_reason) if head_reason else reason, ())
    return iter(dict.fromkeys([*own, *RISING, *FALLING]))


def _generous(trial: Trial, key: str) -> Value:
    return 0 if key in FALLING else trial.most(key)


def _together(trial: Trial, keys: Iterable[str]) -> Needs:
    """Several keys at once: all that help, then as few and as little of each as does."""
    needs = {key: _generous(trial, key) for key in keys}
    if not trial.lets_in(needs):
        return {}
    while (less := _with_less(trial, needs)) != needs:
        needs = less
    return needs


def _with_less(trial: Trial, needs: Needs) -> Needs:
    """Each key left out, or else as little of it as does beside the others. Less of one may make less of another do."""
    for key in reversed(list(needs)):
        others = {other: value for other, value in needs.items() if other != key}
        needs = others if trial.lets_in(others) else {**needs, key: _boundary(trial, key, others, needs[key])}
    return needs


def _boundary(trial: Trial, key: str, others: Needs, good: Value) -> Value:
    """A value that lets it in, next to one that does not; `good` does, and what it was does not."""
    now = trial.value(key)
    assert now is not None
    bad = now
    unit = 1 if isinstance(now, int) else _RESOLUTION
    # From the value that was: what is lacking is little as a rule.
    stride = unit
    while abs(good - now) > stride:
        tried = now + stride if good > now else now - stride
        if trial.lets_in({**others, key: tried}):
            good = tried
            break
        bad = tried
        stride *= 2
    while abs(good - bad) > unit:
        middle = (good + bad) // 2 if unit == 1 else (good + bad) / 2
        if trial.lets_in({**others, key: middle}):
            good = middle
        else:
            bad = middle
    return good
