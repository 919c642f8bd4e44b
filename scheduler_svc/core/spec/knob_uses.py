"""Which settings a policy reads. A setting without effect is rejected where given, and shown as null in listings.

Settings that contradict each other are checked by `PolicySpec`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scheduler_svc.core.spec.policy_spec import PolicySpec

_ANY = object()
"""Marks a setting for which no value means "not used"."""


@dataclass(frozen=True, slots=True)
class Unused:
    """A setting that no part of the policy reads.

    `off`: the value that matches what the policy does anyway. `why`: what the setting would need.
    """

    off: Any
    why: str


def unused_knobs(spec: PolicySpec) -> dict[str, Unused]:
    """Settings without effect under this policy, by name."""
    return {name: Unused(off, why) for name, reads, off, why in _uses(spec) if not reads}


def without_effect(spec: PolicySpec, given: Mapping[str, Any]) -> dict[str, str]:
    """Given settings that the policy does not read, each with the reason."""
    unused = unused_knobs(spec)
    return {name: unused[name].why for name, value in given.items() if name in unused and value != unused[name].off}


def _uses(spec: PolicySpec) -> list[tuple[str, bool, Any, str]]:
    """(setting, whether a part reads it, the value that matches its absence, what it needs)."""
    ages, by_loss, restrained = spec.policy == "aged", spec.victims == "least_lost", spec.restraint is not None
    sorts = not spec.schedules_tasks and spec.phases != "decode_then_prefill"
    has_fast_path = spec.phases == "mixed" and spec.cache in ("v1_pool", "quire") and spec.sliding_window is None
    forecasts = ages or spec.deadlines
    compares = "needs policy=aged, deadlines=true, victims=least_lost or restraint=expected_peak"
    return [
        ("policy", sorts, "fcfs", f"phases={spec.phases} do not sort by it"),
        ("patience_s", ages, _ANY, "needs policy=aged"),
        ("margin_s", spec.makes_way, _ANY, "needs makes_way=true"),
        ("caution", restrained, _ANY, "needs restraint=expected_peak"),
        ("step_s", forecasts, 0.0, "needs policy=aged or deadlines=true"),
        ("compute_token_s", forecasts or by_loss or restrained, 0.0, compares),
        ("swap_block_s", by_loss and spec.can_swap, 0.0, "needs victims=least_lost and a policy that swaps"),
        ("fast_path", has_fast_path, False, "needs mixed phases, a cache of V1's pool and no sliding window"),
        ("defects", spec.is_v0 or spec.schedules_tasks, "repaired", "is of v0 and Chitu"),
        *((name, spec.schedules_tasks, off, f"phases={spec.phases} schedule no tasks") for name, off in _TASKS.items()),
        *_uses_of_batches(spec),
        ("scheduler_type", spec.phases in ("scored", "skew"), "", f"phases={spec.phases} do not order by it"),
        ("pp_size", spec.phases in ("scored", "skew"), 1, f"phases={spec.phases} have no pipeline"),
        ("dp_size", spec.phases == "ranks", 1, "needs phases=ranks"),
        ("dp_prefix_affinity", spec.phases == "ranks", None, "needs phases=ranks"),
    ]


_TASKS = {"max_reqs": None, "prefill_chunk_size": None, "num_scheduler_groups": None}


def _uses_of_batches(spec: PolicySpec) -> list[tuple[str, bool, Any, str]]:
    """The same for the numbers of prefills and decodes in a batch, which Chitu derives from each other."""
    batches = spec.phases == "scored"
    shared = batches and spec.pp_size > 1
    prefills, decodes = shared and spec.max_prefill_tasks is None, shared and spec.max_decode_tasks is None
    why = "needs phases=scored, pp_size above 1 and no {0}"
    fixed = why + ", and {1}=false"
    of_prefills = ("max_prefill_tasks", "prefill_num_tasks_divided_by_pp")
    of_decodes = ("max_decode_tasks", "enforce_decode_num_tasks_max")
    return [
        ("max_prefill_tasks", batches, None, "needs phases=scored"),
        ("max_decode_tasks", batches, None, "needs phases=scored"),
        ("prefill_num_tasks_divided_by_pp", prefills, True, why.format(*of_prefills)),
        ("enforce_decode_num_tasks_max", decodes, True, why.format(*of_decodes)),
        (
            "prefill_num_tasks",
            prefills and not spec.prefill_num_tasks_divided_by_pp,
            None,
            fixed.format(*of_prefills),
        ),
        ("decode_num_tasks", decodes and not spec.enforce_decode_num_tasks_max, None, fixed.format(*of_decodes)),
    ]
