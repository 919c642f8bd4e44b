"""Presets: which parts make which scheduler. A preset is nothing but its parts."""

from block_manager.ledger import Ledger
from block_manager.rules.v1_pool import V1PoolRules
from scheduler_svc.core.admission import MaxSeqs
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.ordering import Fcfs, Priority
from scheduler_svc.core.parts import Ordering, Preemption
from scheduler_svc.core.phases import MixedRunning, MixedWaiting
from scheduler_svc.core.placement import SingleLane
from scheduler_svc.core.policy import Phase
from scheduler_svc.core.preemption import LeastImportantByRecompute, NewestByRecompute
from scheduler_svc.core.progress import AtSchedule
from scheduler_svc.core.queues import queue_for
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state import CoreState
from svc_common.errors import ConfigError

DEFAULT_POLICY = "vllm-v1"


def build(policy: str, limits: CoreLimits, *, order: str = "priority") -> Scheduler:
    """The scheduler of a preset. `order`: "fcfs" or "priority" (equal priorities: by arrival). ConfigError names what exists."""
    if policy not in _PRESETS:
        raise ConfigError(
            f"unknown policy {policy!r}; there are: {', '.join(sorted(_PRESETS))}", reason="UNKNOWN_POLICY"
        )
    if order not in _ORDERS:
        raise ConfigError(f"unknown order {order!r}; there are: {', '.join(sorted(_ORDERS))}", reason="UNKNOWN_ORDER")
    return _PRESETS[policy](policy, limits, order)


def policy_names() -> list[str]:
    """Names that `build` knows."""
    return sorted(_PRESETS)


def _vllm_v1(policy: str, limits: CoreLimits, order: str) -> Scheduler:
    ordering, preemption = _ORDERS[order]()
    progress = AtSchedule()
    ledger = Ledger(
        block_size=limits.block_size,
        num_gpu_blocks=limits.num_gpu_blocks,
        num_cpu_blocks=limits.num_cpu_blocks,
        num_reserved=V1PoolRules.NUM_RESERVED,
    )
    cache = V1PoolRules(ledger, max_model_len=limits.max_model_len, prefix_caching=limits.prefix_caching)
    state = CoreState(limits, cache, queue_for(ordering))
    phases: list[Phase] = [MixedRunning(preemption, progress), MixedWaiting([MaxSeqs()], progress)]
    return Scheduler(policy, state, phases, SingleLane(), progress)


def _fcfs() -> tuple[Ordering, Preemption]:
    return Fcfs(), NewestByRecompute()


def _priority() -> tuple[Ordering, Preemption]:
    return Priority(), LeastImportantByRecompute()


_ORDERS = {"fcfs": _fcfs, "priority": _priority}
_PRESETS = {"vllm-v1": _vllm_v1}
