"""The core in force: built for what a worker has and what the operator chose, recorded, and changed while it runs."""

import logging
from collections.abc import Sequence

from scheduler_svc import policy_change
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.cost_meter import CostMeter
from scheduler_svc.policy_choice import PolicyChoice, WorkerSize
from scheduler_svc.recording.recorder import AnyCore
from scheduler_svc.recording.tape import Tape
from scheduler_svc.worker_link import Ownership
from svc_common.clock import NS_PER_S, monotonic_ns

log = logging.getLogger(__name__)


class CoreKeeper:
    """Owner of `core` and of the choice that it is built by. Steps are counted over all cores of the process.

    `max_under_way`: plans that are sent off before a result is there, None = as many as the policy plans ahead; recordings say it.
    """

    def __init__(self, choice: PolicyChoice, tape: Tape, *, max_under_way: int | None) -> None:
        self.core: AnyCore | None = None
        self._choice = self._started_with = choice
        self._tape = tape
        self._max_under_way = max_under_way
        self._meter = CostMeter()
        self._last_step = 0

    def build(self, owned: Ownership) -> AnyCore:
        """A new core for this worker; the one before is forgotten."""
        step = self.core.step if self.core is not None else self._last_step
        self._meter = CostMeter()
        core = self._choice.build(core_limits(self._choice, owned), rename=self._tape.rename)
        about = {
            "model_digest": owned.limits.model_digest,
            "worker": owned.worker_boot_id,
            "epoch": owned.epoch,
            "max_under_way": self._max_under_way,
        }
        self.core = self._tape.record(core, lambda: monotonic_ns() / NS_PER_S, about)
        self.core.step = step
        return self.core

    def discard(self) -> None:
        """The core is not to be trusted any more."""
        if self.core is not None:
            self._last_step, self.core = self.core.step, None

    def most_rows(self, owned: Ownership) -> int:
        """Sequences that the worker made room for."""
        return core_limits(self._started_with, owned).max_num_seqs

    def observe_cost(self, num_tokens: int, num_moved_blocks: int, duration_ns: int) -> None:
        """What a step cost; when enough is known of it, it is an input of the core."""
        costs = self._meter.observe(num_tokens, num_moved_blocks, duration_ns)
        if costs is not None and self.core is not None:
            self.core.observe_costs(costs)

    def change_policy(self, settings: Sequence[str], owned: Ownership | None) -> tuple[int, list[policy_change.Change]]:
        """Other values for "KEY=VALUE" keys: the first step by them, and what is another. ConfigError, and nothing changed.

        Without a worker they are kept for the core that is to be built.
        """
        choice = self._choice.changed(settings, "SetPolicy")
        choice.check()
        if self.core is None or owned is None:
            self._choice = choice
            return self._last_step + 1, []
        profiled, limits = (core_limits(c, owned) for c in (self._started_with, choice))
        changes = policy_change.change(self.core, profiled, choice.spec, limits)
        self._choice = choice
        for key, old, new in changes:
            log.info("policy from step %d on: %s=%s, was %s", self.core.step + 1, key, new, old)
        return self.core.step + 1, changes


def core_limits(choice: PolicyChoice, owned: Ownership) -> CoreLimits:
    """What the core is built with: the operator's limits and the worker's cache."""
    cache = owned.cache
    size = WorkerSize(cache.block_size, cache.num_gpu_blocks, cache.num_cpu_blocks, owned.limits.max_model_len)
    return choice.core_limits(size)
