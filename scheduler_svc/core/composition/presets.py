"""Presets: named policy specs, and `build`, which assembles a scheduler from a spec."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from block_manager.hashing import HashRename
from scheduler_svc.core.composition import task_policies
from scheduler_svc.core.composition.cache_choice import cache_of, moves_sequences
from scheduler_svc.core.fast_decode.outputs import FastOutputs
from scheduler_svc.core.fast_decode.rows import FastRows
from scheduler_svc.core.intake import RequestIntake
from scheduler_svc.core.limits import AS_LIMITED, CoreLimits, PoolSize
from scheduler_svc.core.outputs import AtOnce, OutputRules
from scheduler_svc.core.parts.admission import Delay, LoraSlots, MaxSeqs, PatientSlots, WholeBatch
from scheduler_svc.core.parts.admission_forecast import PeakForecastAdmission
from scheduler_svc.core.parts.costs import CostBook, Costs
from scheduler_svc.core.parts.fair_queue import FairQueue, TellsShares
from scheduler_svc.core.parts.interfaces import Ordering, Progress
from scheduler_svc.core.parts.lane_choice import SingleLane
from scheduler_svc.core.parts.ordering import AgingPriority, Fcfs, Priority
from scheduler_svc.core.parts.phases import AdmissionPart, Phase
from scheduler_svc.core.parts.placement import PLACEMENTS
from scheduler_svc.core.parts.preemption import LastInOrder, LeastLost, Recompute, SwapOrRecompute, newest
from scheduler_svc.core.parts.progress import AfterResult, AtSchedule, WithPlaceholders
from scheduler_svc.core.parts.progress_guard import ProgressGuard
from scheduler_svc.core.parts.queues import ArrivalQueue, GroupQueue, queue_for
from scheduler_svc.core.parts.step_shares import StepShares
from scheduler_svc.core.parts.tenant_accounts import NoTenantAccounts, ServiceAccount
from scheduler_svc.core.parts.waiting_deadlines import Deadlines, DropExpired
from scheduler_svc.core.policies.mixed.chunk_limit import ChunkLimit
from scheduler_svc.core.policies.mixed.fast_running import FastRunning
from scheduler_svc.core.policies.mixed.mixed import CollectLoras, MixedRunning, MixedWaiting
from scheduler_svc.core.policies.mixed.rank_preemption import RankPreemption
from scheduler_svc.core.policies.mixed.swap_in import BehindSwapped, MixedSwapIns
from scheduler_svc.core.policies.vllm_v0.decode import Decodes
from scheduler_svc.core.policies.vllm_v0.late_outputs import OneStepLate
from scheduler_svc.core.policies.vllm_v0.prefill import Prefills
from scheduler_svc.core.policies.vllm_v0.priority_preemption import PriorityPreemption
from scheduler_svc.core.policies.vllm_v0.shares import Chunks, WholeChunks, WholePrompts
from scheduler_svc.core.policies.vllm_v0.swapped import SwapIns
from scheduler_svc.core.policies.vllm_v0.v0 import DecodeThenPrefill, PrefillOrDecode
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sliding_window import BehindWindow
from scheduler_svc.core.spec.policy_spec import PolicySpec
from scheduler_svc.core.state import CoreState, SharedState
from scheduler_svc.core.workers.worker_group import WorkerGroup
from svc_common.errors import ConfigError

DEFAULT_POLICY = "quire"
Parts = tuple[Progress, OutputRules, list[Phase]]

_V0 = PolicySpec("vllm-v0", phases="prefill_or_decode", cache="vllm_063", progress="after_result", grouping="request")
_QUIRE = PolicySpec(
    "quire",
    cache="quire",
    progress="placeholders",
    batch_queue=2,
    policy="aged",
    tenant_fairness=True,
    victims="least_lost",
    makes_way=True,
    restraint="expected_peak",
    caution=0.3,
    chunk_s=0.4,
    deadlines=True,
)
_CHITU = PolicySpec("chitu", phases="scored", progress="one_under_way", scheduler_type="prefill_first")
_PRESETS = {
    spec.name: spec
    for spec in (
        replace(_V0, name="vllm-2023", cache="vllm_2023"),
        _V0,
        replace(_V0, name="vllm-v0-chunked", phases="decode_then_prefill"),
        PolicySpec("vllm-v1"),
        PolicySpec("vllm-v1-async", progress="placeholders", batch_queue=2),
        PolicySpec("static", batching="static"),
        _CHITU,
        replace(_CHITU, name="chitu-skew", phases="skew"),
        replace(_CHITU, name="chitu-dp", phases="ranks", dp_size=2),
        _QUIRE,
    )
}


def policy_names() -> list[str]:
    """Names that `preset` accepts."""
    return sorted(_PRESETS)


def preset(name: str, /, **knobs: Any) -> PolicySpec:
    """The spec of that name with settings replaced. ConfigError for an unknown name, listing the known ones."""
    if name not in _PRESETS:
        raise ConfigError(f"unknown policy {name!r}; there are: {', '.join(policy_names())}", reason="UNKNOWN_POLICY")
    return _PRESETS[name].with_knobs(**knobs)


def build(
    policy: str | PolicySpec,
    limits: CoreLimits,
    /,
    *,
    pools: Sequence[PoolSize] = (),
    rename: HashRename | None = None,
    **knobs: Any,
) -> Scheduler:
    """Build the scheduler of a preset or spec. ConfigError for limits that contradict it.

    `pools`: of each worker group, which uses at most the blocks that `limits` allow; none = one worker group with just
    those. `rename`: maps token ids and salts before prefixes are hashed, to reproduce a recording made under other
    names.
    """
    spec = preset(policy, **knobs) if isinstance(policy, str) else policy.with_knobs(**knobs)
    spec.check(limits)
    known = list(pools) or [AS_LIMITED]
    return (task_policies.build if spec.schedules_tasks else _build)(spec, limits, known, rename)


def _build(spec: PolicySpec, limits: CoreLimits, pools: list[PoolSize], rename: HashRename | None) -> Scheduler:
    """The scheduler of a spec for queues."""
    costs = first_costs(spec)
    waiting = queue_of(spec, ordering_of(spec, costs))
    shared = SharedState(waiting, costs, account=account_of(waiting))
    deadlines = Deadlines(costs) if spec.deadlines else None
    grouping = Request.as_samples if spec.grouping == "sample" else Request.as_one_group
    intake = RequestIntake(grouping, deadlines, refuses_misfits=spec.has("mixed steps"))
    core = Scheduler(spec, shared, intake, limits)
    for number, pool in enumerate(pools):
        core.put(worker_group(spec, limits.of_pool(pool), shared, number, deadlines, rename), pool)
    return core


def worker_group(
    spec: PolicySpec,
    limits: CoreLimits,
    shared: SharedState,
    number: int,
    deadlines: Deadlines | None,
    rename: HashRename | None,
) -> WorkerGroup:
    """A worker group with empty queues and an empty cache."""
    state = CoreState(
        limits=limits,
        cache=cache_of(spec, limits, rename, shared.chains),
        shared=shared,
        max_total_tokens=limits.max_model_len + (not spec.has("mixed steps")),
        guard=ProgressGuard(),
        fast_rows=FastRows(limits.block_size),
        number=number,
        costs=first_costs(spec),
    )
    progress, outputs, phases = parts(spec, ordering_of(spec, shared.costs), state, deadlines)
    lanes, moves = SingleLane(spec.batch_queue), moves_sequences(spec, limits)
    return WorkerGroup(state, phases, lanes, progress, outputs, first_lane=number, moves_groups=moves)


def first_costs(spec: PolicySpec) -> CostBook:
    """The costs of work on a worker group until they are measured."""
    return CostBook(Costs(spec.step_s, spec.compute_token_s, spec.swap_block_s))


def parts(spec: PolicySpec, ordering: Ordering, state: CoreState, deadlines: Deadlines | None) -> Parts:
    """Progress, output rules and phases of a spec, over a new state or, for `live_change`, an existing one."""
    progress, outputs, phases = _mixed(spec, ordering, state) if spec.has("mixed steps") else _v0(spec, ordering)
    pool = state.cache.device_pool
    if pool is not None and pool.has_windows:
        outputs = BehindWindow(outputs, pool, state.fast_rows)
    if deadlines is not None:
        phases.insert(0, DropExpired(deadlines))
    return progress, outputs, phases


def queue_of(spec: PolicySpec, ordering: Ordering) -> GroupQueue:
    """The waiting queue; v0 sorts its own when it needs to."""
    if spec.tenant_fairness:
        return FairQueue(ordering)
    return queue_for(ordering) if spec.has("mixed steps") else ArrivalQueue()


def account_of(waiting: GroupQueue) -> ServiceAccount:
    """The account of service per tenant: the queue itself if it is fair between tenants, else a no-op."""
    return waiting if isinstance(waiting, FairQueue) else NoTenantAccounts()


def ordering_of(spec: PolicySpec, costs: CostBook) -> Ordering:
    """The ordering that the spec names."""
    known: dict[str, Ordering] = {"fcfs": Fcfs(), "priority": Priority(), "aged": AgingPriority(spec.patience_s, costs)}
    return known[spec.policy]


def _mixed(spec: PolicySpec, ordering: Ordering, state: CoreState) -> Parts:
    progress = WithPlaceholders(spec.num_spec_tokens) if spec.has("placeholders") else AtSchedule()
    least_lost = LeastLost(ordering, state.costs, spec.preemption_mode)
    by_order = Recompute(LastInOrder(ordering) if ordering.sorts_waiting else newest)
    step_shares = StepShares(progress)
    running = MixedRunning(step_shares, least_lost if spec.has("victims by loss") else by_order, progress)
    admission: list[AdmissionPart] = [MaxSeqs()]
    placement = PLACEMENTS[spec.placement]
    if spec.max_loras is not None:
        patient = spec.has("start times")
        slots = PatientSlots(spec.max_loras, ordering, spec.patience_s) if patient else LoraSlots(spec.max_loras)
        admission.append(slots)
    if spec.batching == "static":
        admission.append(WholeBatch())
    if spec.has("a forecast of blocks"):
        admission.append(PeakForecastAdmission(spec.caution))
    behind: list[AdmissionPart] = [BehindSwapped(ordering)] if spec.can_swap else []
    shares: list[AdmissionPart] = [TellsShares()] if spec.tenant_fairness else []
    waiting = MixedWaiting(step_shares, [*behind, *admission, placement, *shares], progress)
    outputs, pool = AtOnce(progress), state.cache.device_pool
    rest: list[Phase] = [] if spec.max_loras is None else [CollectLoras()]
    if spec.can_swap:
        rest.append(MixedSwapIns(ordering, step_shares, admission, running))
    rest.append(waiting)
    first: list[Phase] = [ChunkLimit(spec.chunk_s, spec.num_spec_tokens)] if spec.chunk_s else []
    if spec.makes_way and pool is not None:
        margin_s, max_loras = spec.margin_s, spec.max_loras
        first.append(
            RankPreemption(ordering, step_shares, progress, least_lost, pool, margin_s=margin_s, max_loras=max_loras)
        )
    fast_pool = pool.fast_pool if pool is not None and spec.fast_path else None
    if fast_pool is None:
        return progress, outputs, [*first, running, *rest]
    fast = FastRunning(running, step_shares, state.fast_rows, progress, fast_pool)
    return progress, FastOutputs(outputs, state.fast_rows, progress, fast_pool), [*first, fast, *rest]


def _v0(spec: PolicySpec, ordering: Ordering) -> Parts:
    progress = AfterResult()
    outputs: OutputRules = OneStepLate(progress) if spec.async_output else AtOnce(progress)
    chunked = spec.has("chunks of whole blocks")
    as_recorded = spec.defects == "recorded"
    whole = WholePrompts(spec.num_lookahead_slots)
    of_chunks = WholeChunks if spec.is_multi_step else Chunks
    shares = of_chunks(spec.num_lookahead_slots) if chunked else whole
    slots: list[AdmissionPart] = [] if spec.max_loras is None else [LoraSlots(spec.max_loras)]
    preemption = SwapOrRecompute(newest, spec.preemption_mode, fails_step=as_recorded)
    prefills = Prefills(shares, [Delay(spec.delay_factor), PLACEMENTS[spec.placement], *slots])
    decodes, swap_ins = Decodes(shares, preemption, outputs), SwapIns(whole, slots, leaks_ignored=as_recorded)
    if chunked:
        return progress, outputs, [DecodeThenPrefill(prefills, decodes, swap_ins)]
    make_room = PriorityPreemption(ordering, whole, preemption) if ordering.sorts_waiting else None
    return progress, outputs, [PrefillOrDecode(prefills, decodes, swap_ins, make_room)]
