"""Mapping of Chitu's words for cache type and ranks to one of its schedulers."""

from collections.abc import Mapping
from typing import Any

from scheduler_svc.core.spec.policy_spec import PolicySpec
from scheduler_svc.policy.keys import CACHE_TYPE, CHUNKED_PREFILL, Assignment, bad

_PAGED = "paged"
_CACHE_TYPES = {_PAGED: "scored", "skew": "skew"}


def lane_phases(base: PolicySpec, given: Mapping[str, Assignment]) -> dict[str, Any]:
    """Choose phases as Chitu does: several ranks are data parallel, else the cache type selects the scheduler."""
    wanted = given.get(CACHE_TYPE)
    if wanted is not None and wanted.value not in _CACHE_TYPES:
        raise bad(wanted.origin, f"{CACHE_TYPE} must be one of {', '.join(_CACHE_TYPES)}", field=CACHE_TYPE)
    if not base.schedules_tasks:
        if wanted is not None:
            why = f"{CACHE_TYPE} is Chitu's; policy {base.name} has phases={base.phases}"
            raise bad(wanted.origin, why, field=CACHE_TYPE)
        return {}
    if (given["dp_size"].value if "dp_size" in given else base.dp_size) > 1:
        return {"phases": "ranks"}
    return {"phases": _CACHE_TYPES[wanted.value]} if wanted is not None else {}


def cache_type_of(spec: PolicySpec) -> str | None:
    """Chitu's cache type of a policy; None for policies that schedule no tasks."""
    if not spec.schedules_tasks:
        return None
    return next((word for word, phases in _CACHE_TYPES.items() if phases == spec.phases), _PAGED)


def check_chunks(spec: PolicySpec, given: Mapping[str, Assignment]) -> None:
    """Raise ConfigError if `chunked_prefill` contradicts the size of Chitu's prefill chunks."""
    chunked = given.get(CHUNKED_PREFILL)
    if spec.schedules_tasks and chunked is not None and chunked.value != (spec.prefill_chunk_size is not None):
        raise bad(chunked.origin, f"policy {spec.name} says it by prefill_chunk_size", field=CHUNKED_PREFILL)


def lanes_for(
    base: PolicySpec, given: Mapping[str, Assignment], num_workers: int, policy: str
) -> dict[str, Assignment]:
    """`given` with one rank per worker, if the policy has ranks and their number is not given.

    Raises ConfigError if the numbers of workers and ranks differ, or if a policy without ranks is given
    several workers. `policy`: how the operator spelled the policy, for the error.
    """
    wanted = given.get("dp_size")
    has_ranks = base.has("ranks") if wanted is None else wanted.value > 1 or num_workers > 1
    if not has_ranks or not base.schedules_tasks:
        return dict(given)
    if wanted is None:
        return {**given, "dp_size": Assignment("dp_size", num_workers, policy)}
    if wanted.value != num_workers:
        why = (
            f"dp_size={wanted.value}: there must be as many workers, one for each rank, and {num_workers} given; give --worker "
            f"{wanted.value} times (quire up: --workers {wanted.value}), or leave dp_size out"
        )
        raise bad(
            wanted.origin, why.replace("given", "is given" if num_workers == 1 else "are given", 1), field="dp_size"
        )
    return dict(given)
