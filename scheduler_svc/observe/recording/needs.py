"""Counterfactual of a wait: the knobs and smallest values that would have let a request in at a step, found by search.

Instead of a formula, the step is planned again with other values (`Trial`). So the answer accounts for
everything ahead of the request, and one unit less was tried and does not suffice.
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
"""Knobs that admit more when raised."""
FALLING = ("watermark_blocks", "delay_factor")
"""Knobs that admit more when lowered, down to 0."""
_RESOLUTION = 2.0**-20


class Trial(Protocol):
    """A past step that can be planned again with other values."""

    def value(self, key: str) -> Value | None:
        """The key's recorded value; None if the policy does not have the key or does not limit by it."""

    def most(self, key: str) -> int:
        """A value of that rising key beyond which nothing changes in this step."""

    def lets_in(self, values: Mapping[str, Value]) -> bool:
        """True if the request runs after that step when it is planned with these values."""


def find_needs(trial: Trial, reason: Reason, head_reason: str = "") -> Needs:
    """The smallest values that let the request in; empty if no values do (a result is pending, or its type must wait).

    A single key if one is enough, the reason's own keys first; else as few keys as the search finds. Of
    falling keys the largest value.
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
    """A set of keys: start with all that help, then drop keys and reduce values as far as possible."""
    needs = {key: _generous(trial, key) for key in keys}
    if not trial.lets_in(needs):
        return {}
    while (less := _with_less(trial, needs)) != needs:
        needs = less
    return needs


def _with_less(trial: Trial, needs: Needs) -> Needs:
    """Drop each key, or else reduce it as far as the others allow. A smaller value of one may make a smaller one of another do."""
    for key in reversed(list(needs)):
        others = {other: value for other, value in needs.items() if other != key}
        needs = others if trial.lets_in(others) else {**needs, key: _boundary(trial, key, others, needs[key])}
    return needs


def _boundary(trial: Trial, key: str, others: Needs, good: Value) -> Value:
    """A value that suffices next to one that does not, between the current value, which does not, and `good`, which does."""
    now = trial.value(key)
    assert now is not None
    bad = now
    unit = 1 if isinstance(now, int) else _RESOLUTION
    # Search from the current value in growing strides, since little is missing as a rule.
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
