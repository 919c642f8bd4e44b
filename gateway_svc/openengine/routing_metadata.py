"""Metadata keys of OpenEngine's Inference service. Pure.

openengine-priority is the priority of the request, with Quire's polarity: higher = sooner. openengine-target-dp-rank may be
0, since a cell is one rank. openengine-routing-key has no effect: the scheduler chooses the worker by what each has cached.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from gateway_svc.calls import Call
from svc_common.clipping import clip
from svc_common.errors import InvalidArgument

PREFIX = "openengine-"
ROUTING_KEY = "openengine-routing-key"
PRIORITY = "openengine-priority"
TARGET_DP_RANK = "openengine-target-dp-rank"
INT32 = range(-(2**31), 2**31)
UINT32 = range(2**32)

_NUMBER = re.compile(r"-?\d{1,10}", re.ASCII)


def with_routing(pairs: Sequence[tuple[str, str]], call: Call) -> Call:
    """`call` with the priority in its metadata, unless a trusted router has set one.

    Raises InvalidArgument for a repeated key, an empty routing key, a malformed number, and a rank other than 0.
    """
    values = _single_values(pairs)
    if values.get(ROUTING_KEY) == "":
        raise InvalidArgument.field(ROUTING_KEY, "is empty; leave it out for none")
    rank, priority = _number(values, TARGET_DP_RANK, UINT32), _number(values, PRIORITY, INT32)
    if rank:
        raise InvalidArgument.field(TARGET_DP_RANK, f"is {rank}; a cell is one rank, 0")
    if priority is None or call.goals.priority is not None:
        return call
    return replace(call, goals=replace(call.goals, priority=priority))


def _single_values(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    values: dict[str, str] = {}
    for key, value in pairs:
        if not key.startswith(PREFIX):
            continue
        if key in values:
            raise InvalidArgument.field(key, "is repeated; send it once")
        values[key] = value
    return values


def _number(values: dict[str, str], key: str, allowed: range) -> int | None:
    """The number under `key`; None if it is absent."""
    given = values.get(key)
    if given is None:
        return None
    if not isinstance(given, str) or not _NUMBER.fullmatch(given) or int(given) not in allowed:
        shown = clip(str(given), 40)
        raise InvalidArgument.field(
            key, f"is {shown!r}; it takes a whole number of {allowed.start} to {allowed.stop - 1}"
        )
    return int(given)
