"""CPU time of a step where one scheduler plans for many worker groups, each with a full batch of its own."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.scheduler_core.runs import BLOCK, Case
from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits, PoolSize
from scheduler_svc.core.plan import StepPlan, StepResult
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import StopRules

_WARM_STEPS = 2 * BLOCK
_VOCAB = 32_000


@dataclass(frozen=True, slots=True)
class Planned:
    """`step_us`: CPU time of schedule() and update() of one worker group's step, median over rounds with their range."""

    workers: int
    running: int
    churn: float
    step_us: float
    least_us: float
    most_us: float


class ManyWorkers:
    """A core of so many worker groups with `running` sequences each, of which a share `churn` ends and arrives per step."""

    def __init__(self, num_workers: int, running: int, churn: float) -> None:
        case = Case(running, caching=True, asynchronous=False, churn=churn, n=1)
        limits: CoreLimits = case.limits(512)
        pools = [PoolSize(limits.num_gpu_blocks)] * num_workers
        self.core = presets.build("quire", limits, pools=pools)
        self.case = case
        self._num_workers = num_workers
        self._rng = np.random.default_rng(running)
        self._num_added = 0
        self._lifetime = case.num_requests // case.num_ends if churn else 100_000
        for i in range(num_workers * running):
            self._add(2 + i // (num_workers * case.num_ends) if churn else 100_000)

    def _add(self, max_tokens: int) -> None:
        self._num_added += 1
        prompt = self._rng.integers(0, _VOCAB, 2 * BLOCK + self._num_added % BLOCK).tolist()
        request = Request(f"r{self._num_added}", prompt, StopRules(max_tokens, ignore_eos=True), 0.0)
        self.core.add(request)

    def round(self, now: float) -> int:
        """A step of each worker group, and the requests that replace those that ended; CPU nanoseconds of the steps."""
        spent, num_ended = 0, 0
        for worker in range(self._num_workers):
            started = time.process_time_ns()
            [plan] = self.core.schedule(now, worker)
            spent += time.process_time_ns() - started
            result = self._result(plan)
            started = time.process_time_ns()
            outcome = self.core.update(result)
            spent += time.process_time_ns() - started
            num_ended += sum(ended.request_done for ended in outcome.ended)
        for _ in range(num_ended):
            self._add(self._lifetime)
        return spent

    def _result(self, plan: StepPlan) -> StepResult:
        tokens = self._rng.integers(0, _VOCAB, len(plan.entries)).tolist()
        by_name = {entry.name: [token] for entry, token in zip(plan.entries, tokens, strict=True) if entry.samples}
        num_fast = 0 if plan.fast is None else len(plan.fast.rows)
        return StepResult(plan.step, by_name, column=self._rng.integers(0, _VOCAB, num_fast) if num_fast else None)


def many_workers(counts: Sequence[int], running: int, churn: float, *, num_rounds: int = 3 * BLOCK) -> list[Planned]:
    """The same for each number of worker groups, in turns, round by round."""
    runs = [ManyWorkers(count, running, churn) for count in counts]
    times: list[list[float]] = [[] for _ in runs]
    for step in range(_WARM_STEPS + num_rounds):
        for i, (count, run) in enumerate(zip(counts, runs, strict=True)):
            spent = run.round(float(step)) / count / 1e3
            if step >= _WARM_STEPS:
                times[i].append(spent)
    return [
        Planned(count, running, churn, statistics.median(found), min(found), max(found))
        for count, found in zip(counts, times, strict=True)
    ]
