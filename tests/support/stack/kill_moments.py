"""Moments of a step at which a worker ends itself by SIGKILL: hooks in the worker's own process, around the public calls of a step.

How it is told which moment is meant is in `kill_signs`, how this gets into a worker in `kill_site`.
"""

import math
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np

from protos.worker.v1 import worker_pb2
from tests.support.stack.kill_signs import POISON, POISON_TOKEN, Signs, signs
from worker_svc.executor.forward import Forward
from worker_svc.executor.step_flights import PendingStep
from worker_svc.model.cache.cache_engine import CacheEngine
from worker_svc.rows.batch import IntArray, StepBatch
from worker_svc.rows.options import Rule
from worker_svc.rows.table import RowTable
from worker_svc.sampling.row_sampler import RowSampler

Condition = Callable[[RowTable, StepBatch], bool]


def _middle_chunk(table: RowTable, batch: StepBatch) -> bool:
    """A part of a prompt that began in an earlier step and does not end in this one."""
    added = batch.changes.added
    is_new = np.isin(batch.rows, added.rows if added is not None else [])
    return bool((~is_new & ~batch.reaches_end & (batch.starts > 0)).any())


def _poisoned(table: RowTable, batch: StepBatch) -> bool:
    return bool((table.token_ids[batch.rows, 0] == POISON_TOKEN).any())


BEFORE_FORWARD: dict[str, Condition] = {
    "swap out": lambda table, batch: len(batch.changes.swap_out) > 0,
    "swap in": lambda table, batch: len(batch.changes.swap_in) > 0,
    POISON: _poisoned,
}
"""After the step's moves, before its model."""
AFTER_FORWARD: dict[str, Condition] = {
    "middle chunk": _middle_chunk,
    "beams": lambda table, batch: bool((table.options.num_candidates[batch.sampled_rows] > 0).any()),
    "fork": lambda table, batch: bool((table.options.num_children[batch.sampled_rows] > 1).any()),
}
"""The keys and values are written, no token is drawn."""
AFTER_DRAW: dict[str, Condition] = {
    "grammar": lambda table, batch: bool((table.options.rules[batch.sampled_rows] & Rule.GRAMMAR).any()),
    "penalties": lambda table, batch: bool((table.options.rules[batch.sampled_rows] & Rule.PENALTY).any()),
}
"""The tokens are drawn and in their rows, matchers are advanced, no result was sent."""
IN_A_COPY = "copy"
"""The first block of several, or the only one, is copied; the model did not run."""
BEFORE_ANSWER = "answer"
"""The step is done, its result is not sent."""


def watch_steps() -> None:
    """Puts the hooks in, for the life of this process."""
    _Watch(signs())


class _Watch:
    """Owner of what is known of the step in flight: the arguments of its last forward pass."""

    def __init__(self, found: Signs) -> None:
        self._signs = found
        self._table: RowTable | None = None
        self._batch: StepBatch | None = None
        _wrap(CacheEngine, "copy", self._copy)
        _wrap(CacheEngine, "__init__", _allocate_with_nan)
        _wrap(Forward, "compute", self._compute)
        _wrap(RowSampler, "accept", self._accept)
        _wrap(PendingStep, "finish", self._finish)

    # --- hooks: they get the call that they stand around ---------------------------------------------------------------

    def _copy(self, call: Callable[..., None], cache: CacheEngine, pairs: list[list[int]]) -> None:
        if len(pairs) and self._signs.armed == IN_A_COPY:
            call(cache, pairs[:1])
            self._die(IN_A_COPY, f"{len(pairs)} blocks")
        call(cache, pairs)

    def _compute(self, call: Callable[..., Any], forward: Forward, batch: StepBatch, timings: Any) -> Any:
        self._table, self._batch = forward.table, batch
        self._check(BEFORE_FORWARD)
        self._signs.lose_device()
        computed = call(forward, batch, timings)
        self._check(AFTER_FORWARD)
        return computed

    def _accept(self, call: Callable[..., None], sampler: RowSampler, *runs: IntArray) -> None:
        call(sampler, *runs)
        self._check(AFTER_DRAW)

    def _finish(self, call: Callable[..., worker_pb2.WorkerOutputs], step: PendingStep) -> worker_pb2.WorkerOutputs:
        result = call(step)
        if len(result.token_ids) and self._signs.armed == BEFORE_ANSWER:
            self._die(BEFORE_ANSWER, f"{len(result.token_ids) // 4} tokens")
        return result

    # --- the end -------------------------------------------------------------------------------------------------------

    def _check(self, conditions: dict[str, Condition]) -> None:
        moment = self._signs.armed
        if moment in conditions:
            assert self._table is not None and self._batch is not None
            if conditions[moment](self._table, self._batch):
                self._die(moment, f"{len(self._batch.rows)} rows")

    def _die(self, moment: str, detail: str) -> None:
        self._signs.note(moment, detail)
        os.kill(os.getpid(), signal.SIGKILL)


def _allocate_with_nan(call: Callable[..., None], cache: CacheEngine, *shape: Any, **sizes: Any) -> None:
    """What no token wrote is not a number, and makes every token that reads it another one."""
    call(cache, *shape, **sizes)
    for pool in (cache.device_pool, cache.host_pool):
        if pool.is_floating_point():
            pool.fill_(math.nan)


def _wrap(owner: type, name: str, hook: Callable[..., Any]) -> None:
    call = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **named: hook(call, *arguments, **named))
