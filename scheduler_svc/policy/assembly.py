"""From words to a `PolicyChoice`: a preset's name or a policy file, `--set`, and single options.

    choose("vllm-v0", ["preemption_mode=swap"], max_num_seqs=16).core_limits(worker).…

Later words win: preset, then file, then `--set`. Everything that can be wrong is a ConfigError naming where it was written.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from scheduler_svc.core import presets
from scheduler_svc.core.policies.chitu.task_spec import TASK_PHASES
from scheduler_svc.core.spec import PolicySpec
from scheduler_svc.policy import file as policy_file
from scheduler_svc.policy.choice import CHUNKED, PLACEHOLDERS, WHOLE, PolicyChoice, Spelling, refuse_without_effect
from scheduler_svc.policy.keys import (
    ASYNC,
    CACHE_TYPE,
    CHUNKED_PREFILL,
    Assignment,
    bad,
    checked,
    close_to,
    from_texts,
    limit_names,
)
from scheduler_svc.policy.lanes import lane_phases, lanes_for
from svc_common.errors import ConfigError

# The service's own default where requests carry priorities; the recordings say `fcfs` themselves.
_SERVICE_KNOBS = {"policy": "priority"}
_OPTIONS = {"prefix_caching": "enable_prefix_caching"}


def choose(
    policy: str, sets: Iterable[str] = (), *, spelled: Spelling = str, num_workers: int | None = None, **limits: Any
) -> PolicyChoice:
    """The choice made by `policy` (a preset's name or a file), `sets` and single `limits` (None = not given).

    `num_workers`: that it is to drive; ranks are as many, and nothing else will do. None: as many as it wants.

    `spelled(name)`: how the person who is told of an error writes `policy`, `policy_set` and the limits. A limit beats what a file
    says of it, and contradicts a `--set` that says otherwise.
    """
    file = policy_file.read(policy) if policy_file.names_a_file(policy) else None
    base = _preset(file.base, file.base_origin) if file else _preset(policy, spelled("policy"))
    written = {a.key: a for a in map(checked, file.assignments)} if file else {}
    last = {a.key: a for a in map(checked, from_texts(sets, spelled("policy_set")))}
    options = {
        name: Assignment(name, value, spelled(_OPTIONS.get(name, name)))
        for name, value in limits.items()
        if value is not None
    }
    _refuse_two_words(last, options)
    given = written | last | options
    where = policy if file else f"{spelled('policy')} {policy}"
    if num_workers is not None:
        given = lanes_for(base, given, num_workers, where)
    spec = _spec(replace(base, name=file.name if file else base.name), given, where)
    _refuse_host_blocks(spec, (written | last).get("num_cpu_blocks"))
    return PolicyChoice.with_limits(spec, given, spelled)


def _preset(name: str, origin: str) -> PolicySpec:
    names = presets.policy_names()
    if name not in names:
        raise ConfigError(
            f"{origin}: unknown policy {name!r}{close_to(name, names)}; there are: {', '.join(names)}; "
            f"or give a file that ends in {', '.join(policy_file.SUFFIXES)}",
            reason="UNKNOWN_POLICY",
        )
    return presets.preset(name)


def _refuse_two_words(sets: Mapping[str, Assignment], options: Mapping[str, Assignment]) -> None:
    for name, option in options.items():
        if name in sets and sets[name].value != option.value:
            raise bad(sets[name].origin, f"contradicts {option.origin}, which says {option.value}; give one of them")


def _refuse_host_blocks(spec: PolicySpec, wanted: Assignment | None) -> None:
    """Host blocks are for swapping. The service's own setting is for whatever policy runs, and is not meant here."""
    if wanted is not None and wanted.value and not spec.can_swap:
        why = f"preemption_mode={spec.preemption_mode}" if spec.preemption_mode else f"phases={spec.phases}"
        raise bad(wanted.origin, f"policy {spec.name} ({why}) never swaps; the blocks would lie idle", field=wanted.key)


def _spec(base: PolicySpec, given: Mapping[str, Assignment], where: str) -> PolicySpec:
    knobs = {key: a.value for key, a in given.items() if key not in limit_names() and key not in (ASYNC, CACHE_TYPE)}
    if "num_scheduler_steps" in knobs:
        # The slots that the further steps of a plan write to.
        knobs.setdefault("num_lookahead_slots", max(0, knobs["num_scheduler_steps"] - 1))
    phases = knobs.get("phases", base.phases)
    parts = _asynchronous(base.name, phases, given) | _chunked(phases, given) | lane_phases(base, given)
    for key, value in parts.items():
        if key in knobs and knobs[key] != value and key != "batch_queue":
            raise bad(given[key].origin, f"contradicts another key, which makes {key}={value}", field=key)
    orders_itself = phases in (CHUNKED, *TASK_PHASES) or base.policy == "aged"
    of_service = {} if orders_itself else _SERVICE_KNOBS
    try:
        spec = base.with_knobs(**(of_service | parts | knobs))
    except ConfigError as error:
        wrong = error.metadata.get("field", "")
        origin = given[wrong].origin if wrong in given else where
        raise ConfigError(f"{origin}: {error.message}", reason=error.reason, metadata=error.metadata) from None
    refuse_without_effect(spec, given)
    return spec


def _asynchronous(policy: str, phases: str, given: Mapping[str, Assignment]) -> dict[str, Any]:
    """`async` stands for how v1 counts progress and how many plans are under way (R147, R149). v0 can only do without."""
    if ASYNC not in given:
        return {}
    wanted = given[ASYNC]
    if phases in (WHOLE, CHUNKED, *TASK_PHASES):
        if wanted.value:
            raise bad(wanted.origin, f"{ASYNC} is v1's; policy {policy} has phases={phases}", field=ASYNC)
        return {}
    if wanted.value:
        return {"progress": PLACEHOLDERS, "batch_queue": 2}
    return {"progress": "at_schedule", "batch_queue": 1}


def _chunked(phases: str, given: Mapping[str, Assignment]) -> dict[str, Any]:
    """Under v0 chunking is a matter of phases; under v1 it is a limit."""
    if CHUNKED_PREFILL not in given or phases not in (WHOLE, CHUNKED):
        return {}
    return {"phases": CHUNKED if given[CHUNKED_PREFILL].value else WHOLE}
