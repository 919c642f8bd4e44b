"""Which of Chitu's schedulers an operator means: by its own words for the cache's type and for ranks (R183, R188)."""

from collections.abc import Mapping
from typing import Any

from scheduler_svc.core.spec import PolicySpec
from scheduler_svc.policy_keys import CACHE_TYPE, CHUNKED_PREFILL, Assignment, bad

_PAGED = "paged"
_CACHE_TYPES = {_PAGED: "scored", "skew": "skew"}


def lane_phases(base: PolicySpec, given: Mapping[str, Assignment]) -> dict[str, Any]:
    """Chitu's own rule: several ranks are data parallel, else the cache's type says which scheduler it is."""
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
    """The word for a spec; None for those that schedule no tasks."""
    if not spec.schedules_tasks:
        return None
    return next((word for word, phases in _CACHE_TYPES.items() if phases == spec.phases), _PAGED)


def check_chunks(spec: PolicySpec, given: Mapping[str, Assignment]) -> None:
    """ConfigError where the switch says otherwise than the size of Chitu's chunks."""
    chunked = given.get(CHUNKED_PREFILL)
    if spec.schedules_tasks and chunked is not None and chunked.value != (spec.prefill_chunk_size is not None):
        raise bad(chunked.origin, f"policy {spec.name} says it by prefill_chunk_size", field=CHUNKED_PREFILL)


def check_workers(spec: PolicySpec, origin: str) -> None:
    """ConfigError where there are more ranks than the one worker of this service."""
    if spec.dp_size > 1:
        why = f"dp_size={spec.dp_size}: needs {spec.dp_size} workers, and this service has one"
        raise bad(origin, why, field="dp_size")
