"""The core in use: building it for the workers and the chosen policy, recording it, and changing its policy while it runs."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from protos.common.v1 import common_pb2
from scheduler_svc.core.composition import live_change
from scheduler_svc.core.limits import CoreLimits, PoolSize
from scheduler_svc.core.state import CoreState
from scheduler_svc.loop import policy_change
from scheduler_svc.observe.recording.record_buffer import RecordBuffer
from scheduler_svc.observe.recording.recorder import AnyCore, RecordingCore
from scheduler_svc.policy.choice import PolicyChoice, WorkerSize
from scheduler_svc.workers.cache_agreement import CacheCounts, least, most
from scheduler_svc.workers.link import OwnedStream

log = logging.getLogger(__name__)

_CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Workers:
    """What a core is built for: the model of all workers, and the most cache blocks that one of them has; of ranks the least.

    `compute_beside_us`: the workers compute on the CPU and compete with the services for cores.
    """

    limits: common_pb2.ModelLimits
    bundle: bytes
    cache: CacheCounts
    compute_beside_us: bool

    @classmethod
    def of(cls, owned: Sequence[OwnedStream], *, are_ranks: bool) -> "Workers":
        """Common properties of these workers."""
        on_cpu = any(each.device == _CPU for each in owned)
        cache = (least if are_ranks else most)([each.cache for each in owned])
        return cls(owned[0].limits, owned[0].bundle, cache, on_cpu)

    @property
    def size(self) -> WorkerSize:
        """The sizes that core limits depend on."""
        return WorkerSize.of(self.cache, self.limits)


def pool_of(owned: OwnedStream) -> PoolSize:
    """The blocks of a worker."""
    return PoolSize(owned.cache.num_gpu_blocks, owned.cache.num_cpu_blocks)


class CoreKeeper:
    """Owner of `core` and of the policy choice that it is built by. Step numbers continue across all cores of the process.

    `overlap`: send as many plans ahead of their results as the policy allows; None = unless workers compute
    on the CPU (docs/decisions/0015-no-overlap-on-a-cpu.md). `overlaps`: the resulting setting, which
    recordings contain. `grants`: whether plans may grant steps, unless they overlap (`core/policies/mixed/decode_grants`).
    `on_states` is called with the states of all worker groups when they or their memory were replaced.
    """

    def __init__(
        self,
        choice: PolicyChoice,
        record_buffer: RecordBuffer,
        on_states: Callable[[Sequence[CoreState]], None],
        *,
        overlap: bool | None,
        grants: bool,
    ) -> None:
        self.core: AnyCore | None = None
        self.overlaps = bool(overlap)
        self._choice = self._started_with = choice
        self._record_buffer = record_buffer
        self._on_states = on_states
        self._overlap = overlap
        self._grants = grants
        self._last_step = 0

    def build(self, owned: Sequence[OwnedStream | None]) -> AnyCore:
        """Build a new core for these workers; it replaces the previous one. None: a worker that has not connected yet."""
        step = self.core.step if self.core is not None else self._last_step
        here = [each for each in owned if each is not None]
        workers = Workers.of(here, are_ranks=self.has_ranks)
        self.overlaps = not workers.compute_beside_us if self._overlap is None else self._overlap
        choice = self._choice.for_model(workers.size)
        pools = [] if choice.has_ranks else [pool_of(each or here[0]) for each in owned]
        core = choice.build(self._limits(choice, workers), pools, rename=self._record_buffer.rename)
        about = {
            "model_digest": workers.limits.model_digest,
            "worker": ",".join(each.worker_boot_id for each in here),
            "epoch": here[0].epoch,
            "max_under_way": None if self.overlaps and not core.has_worker_per_lane else 1,
        }
        self.core = self._record_buffer.record(core, time.monotonic, about)
        self.core.step = step
        for number, each in enumerate(owned):
            if each is None:
                core.drain_worker(number)
        self._on_states(core.states)
        return self.core

    def join(self, number: int, owned: OwnedStream, workers: Workers) -> None:
        """Serve a worker with an empty memory in the core in use. `workers`: all that are connected, this one included."""
        self._put(number, pool_of(owned), workers)

    def _put(self, number: int, pool: PoolSize, workers: Workers | None) -> None:
        assert self.core is not None
        limits = self.core.limits
        if workers is not None:
            limits = self._limits(self._choice.for_model(workers.size), workers)
        if isinstance(self.core, RecordingCore):
            self.core.put_worker(number, pool, limits, self._record_buffer.rename)
        else:
            live_change.put_worker(self.core, number, pool, limits)
        self._on_states(self.core.states)

    def expect(self, number: int) -> None:
        """Give a worker that has not connected yet its place in the core in use."""
        assert self.core is not None
        self._put(number, PoolSize(2), None)
        self.core.drain_worker(number)

    @property
    def has_ranks(self) -> bool:
        """True if all workers are ranks, which run in lockstep and have equal pools."""
        return self._choice.has_ranks

    def _limits(self, choice: PolicyChoice, workers: Workers) -> CoreLimits:
        limits = choice.core_limits(workers.size)
        return limits if self.overlaps or not self._grants else replace(limits, max_granted_steps=limits.block_size - 1)

    def discard(self) -> None:
        """Drop the core because its state is not to be trusted any more."""
        if self.core is not None:
            self._last_step, self.core = self.core.step, None
            self._on_states([])

    def most_rows(self, workers: Workers) -> int:
        """Number of sequences that each worker reserved memory for."""
        return self._started_with.core_limits(workers.size).max_num_seqs

    def change_policy(self, settings: Sequence[str], workers: Workers | None) -> tuple[int, list[policy_change.Change]]:
        """Change the policy by "KEY=VALUE" settings; returns the first step under it and the changed values.

        Raises ConfigError, and then nothing has changed. Without workers, the settings apply to the core
        built next.
        """
        choice = self._choice.changed(settings, "SetPolicy")
        choice.check()
        if self.core is None or workers is None:
            self._choice = choice
            return self._last_step + 1, []
        profiled, limits = (self._limits(c, workers) for c in (self._started_with, choice))
        changes = policy_change.change(self.core, profiled, choice.for_model(workers.size).spec, limits)
        self._choice = choice
        for key, old, new in changes:
            log.info("policy from step %d on: %s=%s, was %s", self.core.step + 1, key, new, old)
        return self.core.step + 1, changes
