"""Build a `PolicyChoice` from a preset's name or a policy file, `--set` options, and single options.

    choose("vllm-v0", ["preemption_mode=swap"], max_num_seqs=16).core_limits(worker).…

Precedence: preset, then file, then `--set`. Every mistake is a ConfigError that names where it was written.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from scheduler_svc.core.composition import presets
from scheduler_svc.core.spec.abilities import PARTS, lack, offers_of
from scheduler_svc.core.spec.policy_spec import PolicySpec
from scheduler_svc.policy import file as policy_file
from scheduler_svc.policy.choice import PolicyChoice, Spelling, located, refuse_without_effect
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
from scheduler_svc.settings import SchedulerSettings
from svc_common.errors import ConfigError
from svc_common.net.names import DNS_SCHEME

# The service's default, because requests carry priorities. Recordings of reference schedulers name `fcfs` explicitly.
_SERVICE_KNOBS = {"policy": "priority"}
_OPTIONS = {"prefix_caching": "enable_prefix_caching"}


def policy_of(settings: SchedulerSettings, spelled: Spelling = str) -> PolicyChoice:
    """The policy with its limits. Raises ConfigError, with option names from `spelled`, if it is invalid or not servable."""
    choice = choose(
        settings.policy,
        settings.policy_set,
        spelled=spelled,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        prefix_caching=settings.enable_prefix_caching,
        num_gpu_blocks=settings.num_gpu_blocks,
        num_cpu_blocks=settings.num_cpu_blocks,
        num_workers=max(1, len(settings.workers)),
    )
    choice.check()
    named = next((worker for worker in settings.workers if worker.startswith(DNS_SCHEME)), None)
    if choice.has_ranks and named is not None:
        raise bad(f"--worker {named}", f"policy {choice.spec.name} has a rank for each worker; give their addresses")
    return choice


def choose(
    policy: str, sets: Iterable[str] = (), *, spelled: Spelling = str, num_workers: int | None = None, **limits: Any
) -> PolicyChoice:
    """The choice for `policy` (a preset's name or a file), `sets` and single `limits` (None = not given).

    `num_workers`: number of workers to drive, which must equal the number of ranks; None: as many as the
    policy has ranks.

    `spelled(name)`: how the operator writes `policy`, `policy_set` and the limits, for error messages. A
    limit overrides a file; one that contradicts a `--set` is an error.
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
    """Raise ConfigError for host blocks under a policy that never swaps. The service's own setting is for any policy: exempt."""
    if wanted is not None and wanted.value and not spec.can_swap:
        why = f"preemption_mode={spec.preemption_mode}" if spec.preemption_mode else f"phases={spec.phases}"
        raise bad(wanted.origin, f"policy {spec.name} ({why}) never swaps; the blocks would lie idle", field=wanted.key)


def _spec(base: PolicySpec, given: Mapping[str, Assignment], where: str) -> PolicySpec:
    knobs = {key: a.value for key, a in given.items() if key not in limit_names() and key not in (ASYNC, CACHE_TYPE)}
    if "num_scheduler_steps" in knobs:
        # Slots for the tokens of a plan's further steps.
        knobs.setdefault("num_lookahead_slots", max(0, knobs["num_scheduler_steps"] - 1))
    phases = knobs.get("phases", base.phases)
    parts = _asynchronous(base.name, phases, given) | _chunked(phases, given) | lane_phases(base, given)
    for key, value in parts.items():
        if key in knobs and knobs[key] != value and key != "batch_queue":
            raise bad(given[key].origin, f"contradicts another key, which makes {key}={value}", field=key)
    sorts_by_choice = "a sorted queue" in offers_of("phases", phases) and base.policy == "fcfs"
    of_service = _SERVICE_KNOBS if sorts_by_choice else {}
    try:
        spec = base.with_knobs(**(of_service | parts | knobs))
    except ConfigError as error:
        parts_given = ", ".join(assignment.origin for key, assignment in given.items() if key in PARTS)
        raise located(error, given, parts_given or where) from None
    refuse_without_effect(spec, given)
    return spec


def _asynchronous(policy: str, phases: str, given: Mapping[str, Assignment]) -> dict[str, Any]:
    """Expand `async` to progress and number of plans in flight; without mixed steps it can only be false."""
    if ASYNC not in given:
        return {}
    wanted = given[ASYNC]
    if why := lack(("mixed steps",), offers_of("phases", phases)):
        if wanted.value:
            raise bad(wanted.origin, f"{ASYNC} {why}; policy {policy} has phases={phases}", field=ASYNC)
        return {}
    if wanted.value:
        return {"progress": "placeholders", "batch_queue": 2}
    return {"progress": "at_schedule", "batch_queue": 1}


def _chunked(phases: str, given: Mapping[str, Assignment]) -> dict[str, Any]:
    """Expand `chunked_prefill`: under v0 it selects the phases; under v1 it is a limit."""
    if CHUNKED_PREFILL not in given or "steps of v0" not in offers_of("phases", phases):
        return {}
    return {"phases": "decode_then_prefill" if given[CHUNKED_PREFILL].value else "prefill_or_decode"}
