"""The stops of the tour, in order."""

import difflib
from collections.abc import Sequence
from types import MappingProxyType

from quire_tools.tour.screen import Stop
from quire_tools.tour.stops import (
    batching,
    chitu,
    chitu_threshold,
    cow,
    crash,
    dp,
    explain,
    memory,
    offline,
    overlap,
    phases,
    policy_v0,
    preempt,
    prefix,
    sharing,
    skew,
    startup,
)
from svc_common.errors import ConfigError

_STOPS: tuple[Stop, ...] = (
    batching.STOP,
    memory.STOP,
    sharing.STOP,
    cow.STOP,
    prefix.STOP,
    phases.STOP,
    preempt.STOP,
    policy_v0.STOP,
    chitu.STOP,
    chitu_threshold.STOP,
    skew.STOP,
    dp.STOP,
    overlap.STOP,
    startup.STOP,
    offline.STOP,
    explain.STOP,
    crash.STOP,
)

STOPS = MappingProxyType({stop.name: stop for stop in _STOPS})
"""Stops by name, in the order of the tour."""


def chosen(names: Sequence[str]) -> list[Stop]:
    """The stops with these names, in the order given. Raises ConfigError for an unknown name."""
    for name in names:
        if name not in STOPS:
            close = difflib.get_close_matches(name, STOPS, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ConfigError(f"there is no stop {name!r}{hint}; there are: {', '.join(STOPS)}", reason="NO_SUCH_STOP")
    return [STOPS[name] for name in names]
