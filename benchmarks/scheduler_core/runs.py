"""Runs the real scheduler core without services: full batches, arrivals, pipelines; times the core alone.

Timed: `schedule` and `update`, as CPU time of the process. Not timed: `add`, making results, messages, the
model of --verify. Runs that are compared take turns, round by round, so that both see the same machine.
"""

import gc
import statistics
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from benchmarks.scheduler_core.model import Model
from block_manager.hashing import HashChain
from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepOutcome, StepPlan, StepResult
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import StopRules
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.worker_values import RowSampling
from scheduler_svc.workers.row_planner import RowPlanner

BLOCK = 16
WARM_STEPS = 48
CHURN = 0.01
WINDOW = 4 * BLOCK
_STATE_BLOCKS = 4
_CHECKPOINT_TOKENS = 16 * BLOCK
_VOCAB = 32_000
_PROMPT = 2 * BLOCK
_UNTIMED_STEPS = 8
_FOREVER = 100_000
_SAMPLING = RowSampling(temperature=0.0, top_p=1.0, top_k=0, seed=1)


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration.

    `running` sequences of requests of `n` samples; `churn`: share of them that ends and arrives per step. `num_groups`:
    cache groups, of which all but the first have a window of `WINDOW` tokens. `has_states`: each sequence has blocks of
    states too.
    """

    running: int
    caching: bool
    asynchronous: bool
    churn: float
    n: int
    num_groups: int = 1
    has_states: bool = False

    @property
    def policy(self) -> str:
        """The preset's name."""
        return "vllm-v1-async" if self.asynchronous else "vllm-v1"

    @property
    def num_requests(self) -> int:
        """Requests in the full batch."""
        return max(1, self.running // self.n)

    @property
    def num_ends(self) -> int:
        """Requests that end in each step and arrive in the next; at least one."""
        return max(1, round(self.num_requests * self.churn)) if self.churn else 0

    @property
    def num_timed_steps(self) -> int:
        """A multiple of the block size, so that work done once per block is counted evenly."""
        return 64 if self.running >= 4096 else 128

    def limits(self, num_steps: int) -> CoreLimits:
        """Room for all sequences at once, so that none waits or is preempted."""
        most = self.running + 4 * self.num_ends * self.n + self.n
        blocks_each = (-(-(_PROMPT + BLOCK + num_steps) // BLOCK) + 1) * self.num_groups
        num_state_blocks = _STATE_BLOCKS if self.has_states else 0
        return CoreLimits(
            block_size=BLOCK,
            num_gpu_blocks=1 + most * (blocks_each + 2 * num_state_blocks),
            max_model_len=_FOREVER * 2,
            max_num_seqs=most,
            max_num_batched_tokens=most * (_PROMPT + BLOCK),
            prefix_caching=self.caching,
            cache_windows=(0, *[WINDOW] * (self.num_groups - 1)),
            num_state_blocks=num_state_blocks,
            checkpoint_tokens=_CHECKPOINT_TOKENS if self.has_states else 0,
        )


class Drive:
    """One core with a full batch.

    `aligned`: all sequences fill their blocks in the same step, else 1/16 of them in each.

    `model`: the expected behaviour, if it is checked; `finish` returns the differences.
    """

    def __init__(self, case: Case, *, verify: bool, aligned: bool = False) -> None:
        self.case = case
        self.core = presets.build(case.policy, case.limits(WARM_STEPS + case.num_timed_steps))
        self.model = Model(BLOCK, caching=case.caching) if verify else None
        self.plan_ns = 0
        self.update_ns = 0
        self._aligned = aligned
        self._rng = np.random.default_rng(case.running)
        self._in_flight: deque[StepResult] = deque()
        self._num_added = 0
        self._num_ended = 0
        self._lifetime = case.num_requests // case.num_ends if case.churn else _FOREVER

    def warm_up(self) -> None:
        """Fill the batch and run until prompts are computed and, with churn, requests end in each step."""
        self.fill()
        for _ in range(WARM_STEPS):
            self.step()

    def round(self) -> "Round":
        """One step for each token of a block, timed."""
        self.plan_ns = self.update_ns = 0
        num_scheduled = sum(self.step().num_scheduled for _ in range(BLOCK))
        return Round(self.plan_ns, self.update_ns, num_scheduled)

    def fill(self) -> None:
        """Add the full batch. With churn, request i ends in step 2 + i // num_ends."""
        for i in range(self.case.num_requests):
            self._add(2 + i // self.case.num_ends if self.case.churn else _FOREVER)

    def step(self) -> StepPlan:
        """Add requests, plan a step, and apply the result that is due, if any."""
        while self._num_ended:
            self._num_ended -= 1
            self._add(self._lifetime)
        started = time.process_time_ns()
        [plan] = self.core.schedule(0.0)
        self.plan_ns += time.process_time_ns() - started
        result = self._result(plan)
        if self.model is not None:
            self.model.planned(plan, result)
        self._in_flight.append(result)
        if len(self._in_flight) == self.core.depth:
            self._update()
        return plan

    def finish(self) -> list[str]:
        """Apply the results in flight. Returns the differences between core and model."""
        while self._in_flight:
            self._update()
        return self.model.differences_of(self.core) if self.model is not None else []

    def _add(self, max_tokens: int) -> None:
        self._num_added += 1
        length = _PROMPT + (0 if self._aligned else self._num_added % BLOCK)
        prompt = self._rng.integers(0, _VOCAB, length).tolist()
        request = Request(f"r{self._num_added}", prompt, StopRules(max_tokens, ignore_eos=True), 0.0, n=self.case.n)
        if self.model is not None:
            self.model.added(request)
        self.core.add(request)

    def _result(self, plan: StepPlan) -> StepResult:
        """One token per sampling sequence: by name, and for fast decode rows as a column."""
        tokens = self._rng.integers(0, _VOCAB, len(plan.entries)).tolist()
        by_name = {entry.name: [token] for entry, token in zip(plan.entries, tokens, strict=True) if entry.samples}
        num_fast = 0 if plan.fast is None else len(plan.fast.rows)
        return StepResult(plan.step, by_name, column=self._rng.integers(0, _VOCAB, num_fast) if num_fast else None)

    def _update(self) -> None:
        result = self._in_flight.popleft()
        started = time.process_time_ns()
        outcome: StepOutcome = self.core.update(result)
        self.update_ns += time.process_time_ns() - started
        if self.model is not None:
            self.model.updated(result, outcome)
        self._num_ended += sum(ended.request_done for ended in outcome.ended)


@dataclass(frozen=True, slots=True)
class Round:
    """BLOCK steps: CPU time of `schedule` and of `update`, and sequences in their plans."""

    plan_ns: int
    update_ns: int
    num_scheduled: int


@dataclass(frozen=True, slots=True)
class Steady:
    """Figures of a case. Times: us of CPU per step; bytes: of the message to the worker, per step.

    `ratio`: of a round's time to that of the first case's round before it: median, least, greatest.
    `message_bytes`: the median step, in which no sequence needs a block unless requests arrive.
    `block_bytes`: the mean over 16 steps, in which every sequence gets one block. `mean_scheduled`: sequences
    in the timed plans.
    """

    step_us: float
    schedule_us: float
    update_us: float
    ratio: tuple[float, float, float]
    num_steps: int
    mean_scheduled: float
    message_bytes: int
    block_bytes: float
    differences: list[str]


def steady(case: Case, *, verify: bool) -> Steady:
    """Figures of one case alone."""
    [figures] = side_by_side([case], verify=verify)
    return figures


def side_by_side(cases: list[Case], *, verify: bool) -> list[Steady]:
    """Run cases of one size in turns, first for their times, then each for its messages."""
    drives = [Drive(case, verify=verify) for case in cases]
    for drive in drives:
        drive.warm_up()
    gc.collect()
    turns = [[drive.round() for drive in drives] for _ in range(cases[0].num_timed_steps // BLOCK)]
    firsts, *_ = by_drive = list(zip(*turns, strict=True))
    return [_figures(drive, rounds, firsts) for drive, rounds in zip(drives, by_drive, strict=True)]


def _figures(drive: Drive, rounds: tuple[Round, ...], firsts: tuple[Round, ...]) -> Steady:
    num_steps = len(rounds) * BLOCK
    plan_us = sum(r.plan_ns for r in rounds) * 1e-3 / num_steps
    update_us = sum(r.update_ns for r in rounds) * 1e-3 / num_steps
    ratios = [_ns(r) / _ns(first) for r, first in zip(rounds, firsts, strict=True)]
    sizes = message_sizes(drive.case)
    return Steady(
        step_us=round(plan_us + update_us, 2),
        schedule_us=round(plan_us, 2),
        update_us=round(update_us, 2),
        ratio=(round(statistics.median(ratios), 2), round(min(ratios), 2), round(max(ratios), 2)),
        num_steps=num_steps,
        mean_scheduled=round(sum(r.num_scheduled for r in rounds) / num_steps, 1),
        message_bytes=int(statistics.median_low(sizes)),
        block_bytes=round(statistics.fmean(sizes), 1),
        differences=drive.finish(),
    )


def _ns(times: Round) -> int:
    return times.plan_ns + times.update_ns


def message_sizes(case: Case) -> list[int]:
    """Bytes of the messages of 16 consecutive steps, in a separate run with aligned block boundaries."""
    drive = Drive(case, verify=False, aligned=True)
    planner = RowPlanner(case.limits(0).max_num_seqs)
    drive.fill()
    sizes = [planner.encode(drive.step(), lambda _: _SAMPLING).ByteSize() for _ in range(_UNTIMED_STEPS + BLOCK)]
    drive.finish()
    return sizes[_UNTIMED_STEPS:]


@dataclass(frozen=True, slots=True)
class Admissions:
    """Mean us of CPU per request: `add_us` of `add`, `schedule_us` of the step that admits it.

    `hash_us`: of hashing the prompt's blocks alone, measured in turns with the requests.
    """

    request_us: float
    add_us: float
    schedule_us: float
    hash_us: float
    num_requests: int
    differences: list[str]


def admission(num_prompt_tokens: int, num_requests: int, *, verify: bool) -> dict[bool, Admissions]:
    """Admit prompts one by one, alone, with prefix caching: first new (False), then cached (True)."""
    blocks = num_requests * (num_prompt_tokens // BLOCK + 1) + 1
    tokens = max(2048, num_prompt_tokens)
    limits = CoreLimits(BLOCK, blocks, max_model_len=tokens * 2, max_num_batched_tokens=tokens)
    core = presets.build("vllm-v1", limits)
    rng = np.random.default_rng(num_requests)
    prompts = [rng.integers(0, _VOCAB, num_prompt_tokens).tolist() for _ in range(num_requests)]
    return {hit: admit_all(core, prompts, hit=hit, verify=verify) for hit in (False, True)}


def admit_all(core: Scheduler, prompts: list[list[int]], *, hit: bool, verify: bool) -> Admissions:
    """Admit each prompt and time it. `hit`: all these prompts were admitted before."""
    add_ns = plan_ns = hash_ns = 0
    differences: list[str] = []
    found = (len(prompts[0]) - 1) // BLOCK * BLOCK if hit else 0
    gc.collect()
    for i, prompt in enumerate(prompts):
        request = Request(f"{'hit' if hit else 'miss'}{i}", prompt, StopRules(1, ignore_eos=True), 0.0)
        started = time.process_time_ns()
        core.add(request)
        added = time.process_time_ns()
        [plan] = core.schedule(0.0)
        planned = time.process_time_ns()
        add_ns, plan_ns = add_ns + added - started, plan_ns + planned - added
        [entry] = plan.scheduled
        core.update(StepResult(plan.step, {entry.name: [1]}))
        hash_ns += _hash_ns(prompt)
        if (entry.computed_before, entry.num_tokens) != (found, len(prompt) - found) and verify:
            differences.append(f"{entry.name}: {entry.num_tokens} tokens computed, {entry.computed_before} found")
    if verify:
        gpu = core.pool_report().gpu
        differences += core.check_integrity()
        if gpu.free != gpu.total or core.has_unfinished:
            differences.append(f"{gpu.total - gpu.free} blocks are in use after all requests ended")
    per_request = 1e-3 / len(prompts)
    return Admissions(
        request_us=round((add_ns + plan_ns) * per_request, 2),
        add_us=round(add_ns * per_request, 2),
        schedule_us=round(plan_ns * per_request, 2),
        hash_us=round(hash_ns * per_request, 2),
        num_requests=len(prompts),
        differences=differences,
    )


def _hash_ns(prompt: list[int]) -> int:
    started = time.process_time_ns()
    HashChain(BLOCK).upto(prompt, (len(prompt) - 1) // BLOCK)
    return time.process_time_ns() - started
