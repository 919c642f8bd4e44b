"""The core in force: built for what a worker has and what the operator chose, recorded, and changed while it runs."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from protos.common.v1 import common_pb2
from scheduler_svc.loop import policy_change
from scheduler_svc.observe.recording.recorder import AnyCore
from scheduler_svc.observe.recording.tape import Tape
from scheduler_svc.policy.choice import PolicyChoice, WorkerSize
from scheduler_svc.workers.cache_agreement import CacheCounts, least
from scheduler_svc.workers.cost_meter import CostMeter
from scheduler_svc.workers.link import Ownership
from svc_common.clock import NS_PER_S, monotonic_ns

log = logging.getLogger(__name__)

_CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Workers:
    """What a core is built for: the model that all workers have, and the blocks that each of them has.

    `compute_beside_us`: their threads want the cores that the services run on.
    """

    limits: common_pb2.ModelLimits
    bundle: bytes
    cache: CacheCounts
    compute_beside_us: bool

    @classmethod
    def of(cls, owned: Sequence[Ownership]) -> "Workers":
        """What these have in common."""
        on_cpu = any(each.device == _CPU for each in owned)
        return cls(owned[0].limits, owned[0].bundle, least([each.cache for each in owned]), on_cpu)

    @property
    def size(self) -> WorkerSize:
        """As far as limits depend on it."""
        cache = self.cache
        return WorkerSize(
            cache.block_size,
            cache.num_gpu_blocks,
            cache.num_cpu_blocks,
            self.limits.max_model_len,
            self.limits.sliding_window,
        )


class CoreKeeper:
    """Owner of `core` and of the choice that it is built by. Steps are counted over all cores of the process.

    `overlap`: whether plans are sent off before a result is there, as many as the policy plans ahead; None = as the workers' device
    has it (decision 0015). `overlaps`: what came of that; recordings say it.
    """

    def __init__(self, choice: PolicyChoice, tape: Tape, *, overlap: bool | None) -> None:
        self.core: AnyCore | None = None
        self.overlaps = bool(overlap)
        self._choice = self._started_with = choice
        self._tape = tape
        self._overlap = overlap
        self._meter = CostMeter()
        self._last_step = 0

    def build(self, owned: Sequence[Ownership]) -> AnyCore:
        """A new core for these workers; the one before is forgotten."""
        step = self.core.step if self.core is not None else self._last_step
        self._meter = CostMeter()
        workers = Workers.of(owned)
        self.overlaps = not workers.compute_beside_us if self._overlap is None else self._overlap
        choice = self._choice.for_model(workers.size)
        core = choice.build(choice.core_limits(workers.size), rename=self._tape.rename)
        about = {
            "model_digest": workers.limits.model_digest,
            "worker": ",".join(each.worker_boot_id for each in owned),
            "epoch": owned[0].epoch,
            "max_under_way": None if self.overlaps and not core.has_worker_per_lane else 1,
        }
        self.core = self._tape.record(core, lambda: monotonic_ns() / NS_PER_S, about)
        self.core.step = step
        return self.core

    def discard(self) -> None:
        """The core is not to be trusted any more."""
        if self.core is not None:
            self._last_step, self.core = self.core.step, None

    def most_rows(self, workers: Workers) -> int:
        """Sequences that each worker made room for."""
        return self._started_with.core_limits(workers.size).max_num_seqs

    def observe_cost(self, num_tokens: int, num_moved_blocks: int, duration_ns: int) -> None:
        """What a step cost; when enough is known of it, it is an input of the core."""
        costs = self._meter.observe(num_tokens, num_moved_blocks, duration_ns)
        if costs is not None and self.core is not None:
            self.core.observe_costs(costs)

    def change_policy(self, settings: Sequence[str], workers: Workers | None) -> tuple[int, list[policy_change.Change]]:
        """Other values for "KEY=VALUE" keys: the first step by them, and what is another. ConfigError, and nothing changed.

        Without a worker they are kept for the core that is to be built.
        """
        choice = self._choice.changed(settings, "SetPolicy")
        choice.check()
        if self.core is None or workers is None:
            self._choice = choice
            return self._last_step + 1, []
        profiled, limits = (c.core_limits(workers.size) for c in (self._started_with, choice))
        changes = policy_change.change(self.core, profiled, choice.for_model(workers.size).spec, limits)
        self._choice = choice
        for key, old, new in changes:
            log.info("policy from step %d on: %s=%s, was %s", self.core.step + 1, key, new, old)
        return self.core.step + 1, changes
