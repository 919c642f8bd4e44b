"""Change a running scheduler's ordering, admission, preemption, limits and workers, keeping its requests and blocks."""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from block_manager.hashing import HashRename
from block_manager.pool import BlockPool
from scheduler_svc.core.composition import presets, task_policies
from scheduler_svc.core.limits import CoreLimits, PoolSize
from scheduler_svc.core.parts.fair_queue import FairQueue
from scheduler_svc.core.parts.queues import GroupQueue
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.spec.policy_spec import PolicySpec, as_written
from scheduler_svc.core.state import CoreState
from svc_common.errors import ConfigError

LIVE_KNOBS = (
    "policy",
    "tenant_fairness",
    "patience_s",
    "delay_factor",
    "max_loras",
    "restraint",
    "caution",
    "chunk_s",
    "preemption_mode",
    "victims",
    "makes_way",
    "margin_s",
    "watermark_blocks",
    "placement",
)
"""Settings of ordering, admission and preemption; all others are fixed at start."""
LIVE_TASK_KNOBS = (
    "scheduler_type",
    "max_reqs",
    "prefill_chunk_size",
    "prefill_num_tasks_divided_by_pp",
    "prefill_num_tasks",
    "enforce_decode_num_tasks_max",
    "decode_num_tasks",
    "max_prefill_tasks",
    "max_decode_tasks",
)
"""Settings of task policies (Chitu) that can be changed live."""
_ORDER_KNOBS = frozenset({"policy", "patience_s", "tenant_fairness"})
LIVE_LIMITS = (
    "num_gpu_blocks",
    "num_cpu_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
)
_OUR_PARTS = "scheduler_svc.core."


def reconfigure(core: Scheduler, spec: PolicySpec, limits: CoreLimits) -> None:
    """Apply a new spec and limits from the next plan on, or change nothing. Parts keep what they have learned
    (`MEMORY`).

    ConfigError for settings that are fixed at start, for limits that contradict the policy, and for pools that
    would lose blocks in use. `watermark_blocks` = None keeps the current number of blocks, also when the pool
    size changes.
    """
    states = core.states
    _check(core.spec, spec, core.limits, limits)
    spec.check(limits)
    sizes = [limits.of_pool(pool) for pool in core.pools]
    for state, size in zip(states, sizes, strict=True):
        _check_swapped(spec, state)
        _check_pools(state, size)
        _check_reserved(core.spec, state, size)
    task_policies.check_retune(core, spec, limits)
    for state, size in zip(states, sizes, strict=True):
        _resize(state, spec, size)
    core.state.shared.measure()
    core.limits = limits
    if spec.schedules_tasks:
        task_policies.retune(core, spec, sizes)
        core.spec = spec
    if spec != core.spec:
        _change_parts(core, spec)


def _resize(state: CoreState, spec: PolicySpec, limits: CoreLimits) -> None:
    state.fast_rows.dissolve()
    state.cache.resize(limits.num_gpu_blocks, limits.num_cpu_blocks)
    if spec.watermark_blocks is not None:
        state.cache.watermark_blocks = spec.watermark_blocks
    state.limits = limits
    state.guard.on_tokens()  # preemptions that were fruitless so far may help under the new settings


def put_worker(
    core: Scheduler, number: int, pool: PoolSize, limits: CoreLimits, rename: HashRename | None = None
) -> None:
    """Serve a worker group with an empty memory from the next plan on: a new one, or one that was lost before.

    `number`: of a lost one, or the next. `limits`: of the scheduler from now on; they may differ from the present ones in
    the number of blocks. `rename`: as in `presets.build`.
    """
    core.limits = limits
    make = task_policies.worker_group if core.spec.schedules_tasks else presets.worker_group
    worker = make(core.spec, limits.of_pool(pool), core.state.shared, number, core.deadlines, rename)
    core.put(worker, pool)


def _check(old: PolicySpec, new: PolicySpec, old_limits: CoreLimits, new_limits: CoreLimits) -> None:
    live = LIVE_TASK_KNOBS if old.schedules_tasks else LIVE_KNOBS
    fixed = [n for n in _changed(old, new) if n not in live and n != "name"]
    fixed += [n for n in _changed(old_limits, new_limits) if n not in LIVE_LIMITS]
    if fixed:
        was = {f.name: getattr(source, f.name) for source in (old_limits, old) for f in fields(source)}
        raise ConfigError(
            f"{', '.join(f'{name} (now {as_written(was[name])})' for name in fixed)} cannot be changed while the scheduler runs: "
            "phases, cache rules, progress, lanes and sizes of the model are fixed at start; restart for them. Ordering, "
            f"admission and preemption can be changed: {', '.join((*live, *LIVE_LIMITS))}",
            reason="FIXED_AT_START",
            metadata={"field": fixed[0], "policy": new.name},
        )


def _changed(old: Any, new: Any) -> list[str]:
    return [f.name for f in fields(old) if getattr(old, f.name) != getattr(new, f.name)]


def _check_swapped(spec: PolicySpec, state: CoreState) -> None:
    if state.swapped and not spec.can_swap:
        raise ConfigError(
            f"preemption_mode={as_written(spec.preemption_mode)}: {len(state.swapped)} requests wait on the host and would never "
            "return to the device; try again when there are none",
            reason="BLOCKS_IN_USE",
            metadata={"field": "preemption_mode", "policy": spec.name},
        )


def _check_pools(state: CoreState, limits: CoreLimits) -> None:
    for ledger in state.cache.ledger.parts():
        _check_pool("num_gpu_blocks", ledger.gpu, limits.num_gpu_blocks)
        _check_pool("num_cpu_blocks", ledger.cpu, limits.num_cpu_blocks)


def _check_pool(name: str, pool: BlockPool, wanted: int) -> None:
    least = pool.num_blocks - pool.num_free
    if pool.num_blocks and wanted < least:
        raise ConfigError(
            f"{name}={wanted}: blocks in use cannot be taken away; the least now is {least}",
            reason="BLOCKS_IN_USE",
            metadata={"field": name, "least": str(least)},
        )


def _check_reserved(spec: PolicySpec, state: CoreState, limits: CoreLimits) -> None:
    """Refuse to shrink a pool while its free blocks are reserved for groups that already entered (skew, ranks)."""
    shrinks = limits.num_gpu_blocks < state.limits.num_gpu_blocks
    groups = (group for request in state.requests.values() for group in request.groups if not group.is_finished)
    if spec.has("reserved blocks") and shrinks and any(group.lane is not None for group in groups):
        raise ConfigError(
            f"num_gpu_blocks={limits.num_gpu_blocks}: policy {spec.name} reserves blocks for the requests that it runs; "
            f"keep {state.limits.num_gpu_blocks}, or try again when they have ended",
            reason="BLOCKS_IN_USE",
            metadata={"field": "num_gpu_blocks", "least": str(state.limits.num_gpu_blocks)},
        )


def _change_parts(core: Scheduler, spec: PolicySpec) -> None:
    """Replace the changeable parts by new ones, which take over the state of the old (`MEMORY`)."""
    changed, shared = _changed(core.spec, spec), core.state.shared
    ordering = presets.ordering_of(spec, shared.costs)
    for worker in core.workers:
        old = list(_parts_with_memory(worker.parts))
        worker.change(*presets.parts(spec, ordering, worker.state, core.deadlines))
        for part in _parts_with_memory(worker.parts):
            before = next((o for o in old if type(o) is type(part)), None)
            for name in part.MEMORY if before is not None else ():
                setattr(part, name, getattr(before, name))
    core.spec = spec
    if spec.has("mixed steps") and not _ORDER_KNOBS.isdisjoint(changed):
        shared.waiting = _resorted(shared.waiting, presets.queue_of(spec, ordering))
        shared.account = presets.account_of(shared.waiting)


def _resorted(old: GroupQueue, new: GroupQueue) -> GroupQueue:
    """Move all groups to the new queue in order of arrival (ties keep their order); its own ordering applies."""
    if isinstance(old, FairQueue) and isinstance(new, FairQueue):
        new.shares = old.shares
    for group in sorted(old, key=lambda g: g.request.arrival_time):
        new.push(group)
    return new


def _parts_with_memory(parts: Iterable[object]) -> Iterator[Any]:
    """The parts, including parts of parts, that keep state from step to step (`MEMORY`)."""
    seen: dict[int, object] = {}
    todo = list(parts)
    while todo:
        part = todo.pop()
        if id(part) in seen or not hasattr(part, "__dict__") or not type(part).__module__.startswith(_OUR_PARTS):
            continue
        seen[id(part)] = part
        if hasattr(part, "MEMORY"):
            yield part
        for value in vars(part).values():
            todo += value if isinstance(value, list) else [value]
