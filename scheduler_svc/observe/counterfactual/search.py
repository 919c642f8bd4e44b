"""Counterfactual of a wait: the policy keys and smallest values that would have let a request in at a step, found by search.

Instead of a formula, the step is planned again with other values (`Replanning`). So the answer accounts for
everything ahead of the request, and one unit less was tried and does not suffice.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from scheduler_svc.core.reasons import KEYS, Reason

Value = int | float
Counterfactual = dict[str, Value]

RISING = (
    "num_gpu_blocks",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_loras",
    "num_cpu_blocks",
    "max_reqs",
    "prefill_chunk_size",
    "chunk_s",
)
"""Keys that admit more when raised."""
FALLING = ("watermark_blocks", "delay_factor")
"""Keys that admit more when lowered, down to 0."""
_RESOLUTION = 2.0**-20


class Replanning(Protocol):
    """A past step that can be planned again with other values."""

    def value(self, key: str) -> Value | None:
        """The key's recorded value; None if the policy does not have the key or does not limit by it."""

    def most(self, key: str) -> Value:
        """A value of that rising key beyond which nothing changes in this step."""

    def lets_in(self, values: Mapping[str, Value]) -> bool:
        """True if the request runs after that step when it is planned with these values."""


def find_counterfactual(replanning: Replanning, reason: Reason, head_reason: str = "") -> Counterfactual:
    """The smallest values that let the request in; empty if no values do (a result is pending, or its type must wait).

    A single key if one is enough, the reason's own keys first; else as few keys as the search finds. Of
    falling keys the largest value.
    """
    if replanning.lets_in({}):
        return {}  # it was let in
    keys = [key for key in _keys(reason, head_reason) if replanning.value(key) is not None]
    for key in keys:
        if replanning.lets_in({key: _generous(replanning, key)}):
            return {key: _boundary(replanning, key, {}, _generous(replanning, key))}
    return _together(replanning, keys)


def _keys(reason: Reason, head_reason: str) -> Iterator[str]:
    own = KEYS.get(Reason(head_reason) if head_reason else reason, ())
    return iter(dict.fromkeys([*own, *RISING, *FALLING]))


def _generous(replanning: Replanning, key: str) -> Value:
    return 0 if key in FALLING else replanning.most(key)


def _together(replanning: Replanning, keys: Iterable[str]) -> Counterfactual:
    """A set of keys: start with all that help, then drop keys and reduce values as far as possible."""
    values = {key: _generous(replanning, key) for key in keys}
    if not replanning.lets_in(values):
        return {}
    while (less := _with_less(replanning, values)) != values:
        values = less
    return values


def _with_less(replanning: Replanning, values: Counterfactual) -> Counterfactual:
    """Drop each key, or else reduce it as far as the others allow. A smaller value of one may make a smaller one of another do."""
    for key in reversed(list(values)):
        others = {other: value for other, value in values.items() if other != key}
        values = (
            others if replanning.lets_in(others) else {**values, key: _boundary(replanning, key, others, values[key])}
        )
    return values


def _boundary(replanning: Replanning, key: str, others: Counterfactual, good: Value) -> Value:
    """A value that suffices next to one that does not, between the current value, which does not, and `good`, which does."""
    now = replanning.value(key)
    assert now is not None
    bad = now
    unit = 1 if isinstance(now, int) else _RESOLUTION
    # Search from the current value in growing strides, since little is missing as a rule.
    stride = unit
    while abs(good - now) > stride:
        tried = now + stride if good > now else now - stride
        if replanning.lets_in({**others, key: tried}):
            good = tried
            break
        bad = tried
        stride *= 2
    while abs(good - bad) > unit:
        middle = (good + bad) // 2 if unit == 1 else (good + bad) / 2
        if replanning.lets_in({**others, key: middle}):
            good = middle
        else:
            bad = middle
    return good
