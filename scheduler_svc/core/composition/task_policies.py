"""Build schedulers of Chitu's three task policies, which differ in phase and placement."""

from block_manager.hashing import HashRename
from block_manager.rules.per_rank import PerRankRules, RankRules
from scheduler_svc.core.composition.cache_choice import moves_sequences, v1_rules
from scheduler_svc.core.fast_decode.rows import FastRows
from scheduler_svc.core.intake import RequestIntake
from scheduler_svc.core.limits import CoreLimits, PoolSize
from scheduler_svc.core.outputs import AtOnce, OutputRules
from scheduler_svc.core.parts.costs import CostBook, Costs
from scheduler_svc.core.parts.interfaces import InspectablePart, LaneChoice
from scheduler_svc.core.parts.phases import Phase
from scheduler_svc.core.parts.placement import PLACEMENTS
from scheduler_svc.core.parts.preemption import Recompute, newest
from scheduler_svc.core.parts.progress import OneUnderWay
from scheduler_svc.core.parts.progress_guard import MAX_EMPTY_PLANS, STUCK, ProgressGuard
from scheduler_svc.core.parts.queues import ArrivalQueue
from scheduler_svc.core.parts.waiting_deadlines import Deadlines
from scheduler_svc.core.policies.chitu.affinity import PrefixAffinity
from scheduler_svc.core.policies.chitu.lanes import Ranks, SchedulerGroups, SkewSlots
from scheduler_svc.core.policies.chitu.ranks import RankBatches
from scheduler_svc.core.policies.chitu.scored import BatchLimits, ScoredBatch
from scheduler_svc.core.policies.chitu.scorers import TaskOrder
from scheduler_svc.core.policies.chitu.skew import SkewBatch
from scheduler_svc.core.policies.chitu.tasks import TaskShares
from scheduler_svc.core.policies.chitu.threshold import AdaptiveThreshold, RecoveringOutputs
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sliding_window import BehindWindow
from scheduler_svc.core.spec.policy_spec import PolicySpec
from scheduler_svc.core.state import CoreState, SharedState
from scheduler_svc.core.workers.worker_group import WorkerGroup
from svc_common.errors import ConfigError

LEFT_TO_OTHERS = "the policy leaves such work to another scheduler, and none took it over"

TaskParts = tuple[RankRules | PerRankRules, OneUnderWay, OutputRules, list[Phase], LaneChoice, list[InspectablePart]]


def build(spec: PolicySpec, limits: CoreLimits, pools: list[PoolSize], rename: HashRename | None) -> Scheduler:
    """The scheduler of a spec for task policies. `pools`: of each worker group; one where lanes are ranks."""
    shared = SharedState(ArrivalQueue(), _first_costs(spec))
    intake = RequestIntake(Request.as_samples, None, refuses_misfits=spec.defects == "repaired")
    core = Scheduler(spec, shared, intake, limits)
    for number, pool in enumerate(pools):
        core.put(worker_group(spec, limits.of_pool(pool), shared, number, None, rename), pool)
    return core


def worker_group(
    spec: PolicySpec,
    limits: CoreLimits,
    shared: SharedState,
    number: int,
    _deadlines: Deadlines | None,
    rename: HashRename | None,
) -> WorkerGroup:
    """A worker group with empty queues and an empty cache."""
    assemble = _ranks if spec.has("ranks") else _skew if spec.has("cache slots") else _scored
    caches = [v1_rules(spec, limits, rename, shared.chains) for _ in range(spec.dp_size)]
    cache, progress, outputs, phases, lanes, views = assemble(spec, limits, caches)
    state = CoreState(
        limits=limits,
        cache=cache,
        shared=shared,
        max_total_tokens=limits.max_model_len,
        guard=_guard(spec, limits),
        fast_rows=FastRows(limits.block_size),
        number=number,
        costs=_first_costs(spec),
    )
    if cache.has_windows:
        outputs = BehindWindow(outputs, cache, state.fast_rows)
    first_lane, moves = number * lanes.num_lanes, moves_sequences(spec, limits)
    return WorkerGroup(state, phases, lanes, progress, outputs, views, first_lane=first_lane, moves_groups=moves)


def _first_costs(spec: PolicySpec) -> CostBook:
    return CostBook(Costs(spec.step_s, spec.compute_token_s, spec.swap_block_s))


def _guard(spec: PolicySpec, limits: CoreLimits) -> ProgressGuard:
    """Chitu's own schedulers may wait forever; repaired ones give up after enough empty plans for every slot to
    have several turns.
    """
    if spec.defects == "recorded":
        return ProgressGuard(None)
    num_turns = len(spec.slot_sizes(limits)) if spec.has("cache slots") else 1
    only = _order(spec).only
    return ProgressGuard(MAX_EMPTY_PLANS * num_turns, STUCK if only is None else f"{LEFT_TO_OTHERS} ({only})")


def _scored(spec: PolicySpec, limits: CoreLimits, pools: list[RankRules]) -> TaskParts:
    [cache] = pools
    shares = TaskShares(OneUnderWay(), cache, PLACEMENTS[spec.placement])
    threshold = AdaptiveThreshold(cache.ledger.gpu)
    fails = spec.defects == "recorded"
    phase = ScoredBatch(_order(spec), shares, _of_batch(spec, limits), threshold, Recompute(newest), fails=fails)
    groups, outputs = SchedulerGroups(spec.num_groups()), RecoveringOutputs(shares.progress, threshold)
    return cache, shares.progress, outputs, [phase], groups, [phase, groups]


def _skew(spec: PolicySpec, limits: CoreLimits, pools: list[RankRules]) -> TaskParts:
    [cache] = pools
    shares = TaskShares(OneUnderWay(), cache, PLACEMENTS[spec.placement])
    slots = SkewSlots(spec.slot_sizes(limits))
    strict = spec.defects == "recorded"
    phase = SkewBatch(_order(spec), shares, slots, spec.prefill_chunk_size, strict_residents=strict)
    return cache, shares.progress, AtOnce(shares.progress), [phase], slots, [slots]


def _ranks(spec: PolicySpec, limits: CoreLimits, pools: list[RankRules]) -> TaskParts:
    cache = PerRankRules(pools)
    shares = TaskShares(OneUnderWay(), cache, PLACEMENTS[spec.placement])
    ranks = Ranks(spec.dp_size, spec.tasks_per_rank(limits))
    affinity = PrefixAffinity(cache, spec.dp_prefix_affinity)
    phase = RankBatches(shares, ranks, spec.prefill_chunk_size, affinity, starves=spec.defects == "recorded")
    return cache, shares.progress, AtOnce(shares.progress), [phase], ranks, [ranks]


def retune(core: Scheduler, spec: PolicySpec, sizes: list[CoreLimits]) -> None:
    """Apply the order and sizes of that spec to the phase and its slots. `sizes`: the limits of each worker group.

    ConfigError if the number of slots would change.
    """
    for worker, limits in zip(core.workers, sizes, strict=True):
        _retune(core, worker, spec, limits)


def _retune(core: Scheduler, worker: WorkerGroup, spec: PolicySpec, limits: CoreLimits) -> None:
    for phase in worker.parts:
        if isinstance(phase, ScoredBatch):
            phase.retune(_order(spec), _of_batch(spec, limits))
        elif isinstance(phase, SkewBatch):
            phase.retune(_order(spec), _same_slots(core.spec, core.limits, spec, limits), spec.prefill_chunk_size)
        elif isinstance(phase, RankBatches):
            phase.retune(spec.tasks_per_rank(limits), spec.prefill_chunk_size)


def check_retune(core: Scheduler, spec: PolicySpec, limits: CoreLimits) -> None:
    """Raise ConfigError where `retune` would."""
    if spec.has("cache slots"):
        _same_slots(core.spec, core.limits, spec, limits)


def _same_slots(old: PolicySpec, old_limits: CoreLimits, spec: PolicySpec, limits: CoreLimits) -> list[int]:
    sizes, num_slots = spec.slot_sizes(limits), len(old.slot_sizes(old_limits))
    if len(sizes) != num_slots:
        raise ConfigError(
            f"max_reqs={spec.num_reqs(limits)} would make {len(sizes)} slots of {num_slots}, and slots are fixed at start",
            reason="FIXED_AT_START",
            metadata={"field": "max_reqs", "policy": spec.name},
        )
    return sizes


def _of_batch(spec: PolicySpec, limits: CoreLimits) -> BatchLimits:
    return BatchLimits(spec.num_prefills(limits), spec.num_decodes(limits), spec.prefill_chunk_size)


def _order(spec: PolicySpec) -> TaskOrder:
    return TaskOrder.of(spec.scheduler_type, returns_evicted=spec.defects == "repaired")
