"""Presets: which parts make which scheduler. A preset is a `PolicySpec`; `build` puts the parts together, the same way for all."""

from dataclasses import replace
from typing import Any

from block_manager.cache_rules import CacheRules
from block_manager.rules.no_blocks import NoBlocks
from block_manager.rules.quire_rules import QuireRules
from block_manager.rules.v1_pool import V1PoolRules
from block_manager.rules.vllm_063 import Vllm063Rules
from block_manager.rules.vllm_2023 import Vllm2023Rules
from scheduler_svc.core.admission import Delay, LoraSlots, MaxSeqs, WholeBatch
from scheduler_svc.core.intake import Intake
from scheduler_svc.core.late_outputs import OneStepLate
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.ordering import Fcfs, Priority
from scheduler_svc.core.outputs import AtOnce, OutputRules
from scheduler_svc.core.parts import Ordering, Progress
from scheduler_svc.core.phases.decode import Decodes
from scheduler_svc.core.phases.mixed import CollectLoras, MixedRunning, MixedWaiting
from scheduler_svc.core.phases.prefill import Prefills
from scheduler_svc.core.phases.priority_preemption import PriorityPreemption
from scheduler_svc.core.phases.shares import Chunks, WholeChunks, WholePrompts
from scheduler_svc.core.phases.swapped import SwapIns
from scheduler_svc.core.phases.v0 import DecodeThenPrefill, PrefillOrDecode
from scheduler_svc.core.placement import SingleLane
from scheduler_svc.core.policy import Admission, Phase
from scheduler_svc.core.preemption import Recompute, SwapOrRecompute, least_important, newest
from scheduler_svc.core.progress import AfterResult, AtSchedule, WithPlaceholders
from scheduler_svc.core.progress_guard import ProgressGuard
from scheduler_svc.core.queues import ArrivalQueue, queue_for
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.spec import PolicySpec
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.steady.outputs import SteadyOutputs
from scheduler_svc.core.steady.rows import SteadyRows
from scheduler_svc.core.steady.running import SteadyRunning
from svc_common.errors import ConfigError

DEFAULT_POLICY = "vllm-v1"
Parts = tuple[Progress, OutputRules, list[Phase]]

_V0 = PolicySpec("vllm-v0", phases="prefill_or_decode", cache="vllm_063", progress="after_result", grouping="request")
_PRESETS = {
    spec.name: spec
    for spec in (
        replace(_V0, name="vllm-2023", cache="vllm_2023"),
        _V0,
        replace(_V0, name="vllm-v0-chunked", phases="decode_then_prefill"),
        PolicySpec("vllm-v1"),
        PolicySpec("vllm-v1-async", progress="placeholders", batch_queue=2),
        PolicySpec("static", batching="static"),
    )
}


def policy_names() -> list[str]:
    """Names that `preset` knows."""
    return sorted(_PRESETS)


def preset(name: str, /, **knobs: Any) -> PolicySpec:
    """The spec of that name, with other knobs. ConfigError names what exists."""
    if name not in _PRESETS:
        raise ConfigError(f"unknown policy {name!r}; there are: {', '.join(policy_names())}", reason="UNKNOWN_POLICY")
    return replace(_PRESETS[name], **knobs)


def build(policy: str | PolicySpec, limits: CoreLimits, /, **knobs: Any) -> Scheduler:
    """The scheduler of a preset or spec. ConfigError for limits that contradict it."""
    spec = preset(policy, **knobs) if isinstance(policy, str) else replace(policy, **knobs)
    spec.check(limits)
    ordering: Ordering = Priority() if spec.policy == "priority" else Fcfs()
    v1 = spec.phases == "mixed"
    state = CoreState(
        limits=limits,
        cache=_cache(spec, limits),
        waiting=queue_for(ordering) if v1 else ArrivalQueue(),
        max_total_tokens=limits.max_model_len + (not v1),
        guard=ProgressGuard(),
        steady=SteadyRows(limits.block_size),
    )
    intake = Intake(Request.as_samples if spec.grouping == "sample" else Request.as_one_group, refuses_misfits=v1)
    progress, outputs, phases = _mixed(spec, state) if v1 else _v0(spec, ordering)
    return Scheduler(spec.name, state, intake, phases, SingleLane(spec.batch_queue), progress, outputs)


def _cache(spec: PolicySpec, limits: CoreLimits) -> CacheRules:
    sizes: dict[str, Any] = {
        "block_size": limits.block_size,
        "num_gpu_blocks": limits.num_gpu_blocks,
        "num_cpu_blocks": limits.num_cpu_blocks,
        "max_model_len": limits.max_model_len,
        "prefix_caching": limits.prefix_caching,
    }
    if spec.cache == "v1_pool":
        return V1PoolRules.make(**sizes)
    if spec.cache == "none":
        return NoBlocks(max_model_len=limits.max_model_len)
    if spec.cache == "quire":
        return QuireRules.make(**sizes, watermark_blocks=spec.watermark_blocks)
    sizes |= {"watermark_blocks": spec.watermark_blocks, "sliding_window": spec.sliding_window}
    if spec.cache == "vllm_2023":
        return Vllm2023Rules.make(**sizes)
    return Vllm063Rules.make(**sizes, counts_whole_prompts=spec.defects == "recorded")


def _mixed(spec: PolicySpec, state: CoreState) -> Parts:
    asynchronous = spec.progress == "placeholders"
    progress = WithPlaceholders(spec.num_spec_tokens) if asynchronous else AtSchedule()
    running = MixedRunning(Recompute(least_important if spec.policy == "priority" else newest), progress)
    admission: list[Admission] = [MaxSeqs()]
    if spec.max_loras is not None:
        admission.append(LoraSlots(spec.max_loras))
    if spec.batching == "static":
        admission.append(WholeBatch())
    waiting, outputs, cache = MixedWaiting(admission, progress), AtOnce(progress), state.cache
    before: list[Phase] = [] if spec.max_loras is None else [CollectLoras()]
    if not (spec.fast_path and isinstance(cache, V1PoolRules)):
        return progress, outputs, [running, *before, waiting]
    steady = SteadyRunning(running, state.steady, progress, cache)
    return progress, SteadyOutputs(outputs, state.steady, progress, cache), [steady, *before, waiting]


def _v0(spec: PolicySpec, ordering: Ordering) -> Parts:
    progress = AfterResult()
    outputs: OutputRules = OneStepLate(progress) if spec.async_output else AtOnce(progress)
    chunked = spec.phases == "decode_then_prefill"
    as_recorded = spec.defects == "recorded"
    whole = WholePrompts(spec.num_lookahead_slots)
    of_chunks = WholeChunks if spec.is_multi_step else Chunks
    shares = of_chunks(spec.num_lookahead_slots) if chunked else whole
    slots: list[Admission] = [] if spec.max_loras is None else [LoraSlots(spec.max_loras)]
    preemption = SwapOrRecompute(newest, spec.preemption_mode, fails_step=as_recorded)
    prefills = Prefills(shares, [Delay(spec.delay_factor), *slots])
    decodes, swap_ins = Decodes(shares, preemption, outputs), SwapIns(whole, slots, leaks_ignored=as_recorded)
    if chunked:
        return progress, outputs, [DecodeThenPrefill(prefills, decodes, swap_ins)]
    make_room = PriorityPreemption(ordering, whole, preemption) if spec.policy == "priority" else None
    return progress, outputs, [PrefillOrDecode(prefills, decodes, swap_ins, make_room)]
