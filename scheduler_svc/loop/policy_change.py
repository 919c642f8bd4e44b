"""Changing the policy while the service runs: checks of what the workers fixed at start; `core.live_change` checks the rest."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from scheduler_svc.core.composition import live_change
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.spec.policy_spec import PolicySpec
from scheduler_svc.observe.recording.recorder import AnyCore, RecordingCore
from svc_common.errors import ConfigError

_OF_THE_WORKER = ("max_num_batched_tokens", "max_num_seqs")

Change = tuple[str, Any, Any]


def change(core: AnyCore, profiled: CoreLimits, spec: PolicySpec, limits: CoreLimits) -> list[Change]:
    """Apply another policy and limits from the next plan on; returns the changes as (key, old value, new value). All or nothing.

    `profiled`: the limits that the workers reserved memory for. Raises ConfigError for higher ones, and for
    what is fixed at start.
    """
    for name in _OF_THE_WORKER:
        most, wanted = getattr(profiled, name), getattr(limits, name)
        if wanted > most:
            raise ConfigError(
                f"{name}={wanted}: the worker has memory for steps of at most {most}; restart the scheduler for more",
                reason="FIXED_AT_START",
                metadata={"field": name},
            )
    changes = [*_differences(core.spec, spec), *_differences(core.limits, limits)]
    if isinstance(core, RecordingCore):
        core.reconfigure(spec, limits)
    else:
        live_change.reconfigure(core, spec, limits)
    return changes


def _differences(old: Any, new: Any) -> Sequence[Change]:
    pairs = [(f.name, getattr(old, f.name), getattr(new, f.name)) for f in fields(old)]
    return [(name, before, now) for name, before, now in pairs if before != now]
