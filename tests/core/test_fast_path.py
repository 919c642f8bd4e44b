"""Equal decisions with the fast path off and on: the same random life, lived twice, gives the same transcript."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepPlan, StepResult
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import StopRules
from scheduler_svc.core.scheduler import Scheduler
from tests.support.core.builders import next_token

EOS = 7
Transcript = list[Any]


MODELS = ("one table", "one window", "groups", "states", "groups and states")


def make(policy: str, seed: int, *, fast_path: bool, model: str = MODELS[0]) -> Scheduler:
    """A small core; everything about it follows from the seed and the model's cache."""
    rng = random.Random(seed)
    budget = rng.choice([5, 8, 16, 40])
    limits = CoreLimits(
        block_size=4,
        num_gpu_blocks=rng.choice([6, 9, 14, 40, 120]),
        max_model_len=40,
        max_num_seqs=min(budget, rng.choice([2, 5, 12])),
        max_num_batched_tokens=budget,
        prefix_caching=rng.random() < 0.6,
        num_cpu_blocks=20 if policy == "quire" else 0,
        long_prefill_token_threshold=rng.choice([0, 0, 3]),
    )
    limits = with_cache_of(model, limits, rng)
    knobs = {"sliding_window": rng.choice([1, 3, 6])} if model == "one window" else {}
    if policy != "quire":
        return presets.build(policy, limits, policy=rng.choice(["fcfs", "priority"]), fast_path=fast_path, **knobs)
    costs = {
        "compute_token_s": 0.1,
        "swap_block_s": rng.choice([0.0, 0.05, 10.0]),
        "patience_s": rng.choice([0.0, 3.0]),
    }
    restraint = rng.choice([None, "expected_peak"])
    return presets.build(policy, limits, fast_path=fast_path, restraint=restraint, **knobs, **costs)


def with_cache_of(model: str, limits: CoreLimits, rng: random.Random) -> CoreLimits:
    """The limits of such a model, whose sequences need more blocks."""
    windows = (0, 3, rng.choice([4, 9]), *[rng.choice([0, 6])] * rng.randint(0, 2)) if "groups" in model else ()
    num_states = rng.choice([1, 3]) if "states" in model else 0
    return replace(
        limits,
        num_gpu_blocks=1 + (limits.num_gpu_blocks - 1) * max(1, len(windows)) + 4 * num_states,
        num_cpu_blocks=limits.num_cpu_blocks * (1 + len(windows)),
        cache_windows=windows,
        num_state_blocks=num_states,
        checkpoint_tokens=rng.choice([4, 8]) if num_states else 0,
    )


class Life:
    """One core driven by a seed. Equal decisions of the core give equal questions to it."""

    def __init__(self, core: Scheduler, seed: int) -> None:
        self._core = core
        self._rng = random.Random(seed + 1)
        self._in_flight: list[tuple[StepPlan, list[Any], list[str]]] = []
        self._count = 0
        self.num_fast = 0
        self.transcript: Transcript = []

    def live(self, num_acts: int) -> Transcript:
        """Arrivals, plans, results, aborts, failures and stop strings; then everything is brought to its end."""
        for _ in range(num_acts):
            self._act(self._rng.random())
            assert self._core.check_integrity() == []
        for _ in range(3_000):
            if not (self._core.has_unfinished or self._in_flight):
                break
            self._schedule()
            while self._in_flight:
                self._finish(fate=1.0)
        report = self._core.pool_report()
        assert report.gpu.free == report.gpu.total
        return self.transcript

    def _act(self, chance: float) -> None:
        if chance < 0.12:
            self._arrive()
        elif chance < 0.14:
            self._note(self._core.abort([self._any()]))
        elif chance < 0.16:
            self._note(self._core.stop_at(f"{self._any()}/0", self._rng.randint(1, 4)))
        elif chance < 0.60:
            self._schedule()
        elif self._in_flight:
            self._finish(fate=self._rng.random())

    def _any(self) -> str:
        return f"r{self._rng.randint(0, self._count)}"

    def _arrive(self) -> None:
        length = self._rng.randint(1, 14)
        alike = self._rng.random() < 0.5
        prompt = [1 + i for i in range(length)] if alike else self._rng.choices(range(50, 60), k=length)
        stop = StopRules(
            max_tokens=self._rng.randint(1, 25),
            min_tokens=self._rng.choice([0, 0, 1, 3]),
            eos_token_ids=frozenset([EOS]),
            ignore_eos=self._rng.random() < 0.3,
        )
        priority, n = self._rng.randint(0, 2), self._rng.choice([1, 1, 1, 2])
        request = Request(f"r{self._count}", prompt, stop, float(self._count), priority, n)
        self._count += 1
        if length <= self._core.state.cache.capacity_tokens:
            self._core.add(request)

    def _schedule(self) -> None:
        for plan in self._core.schedule(0.0):
            self.num_fast += len(plan.fast.rows) if plan.fast is not None else 0
            self._note(
                plan.scheduled,
                plan.preempted,
                plan.lookups,
                plan.left,
                plan.finished,
                plan.ended,
                plan.states.to_read if plan.states else [],
                plan.states.to_keep if plan.states else [],
                plan.num_batched_tokens,
            )
            if not plan.is_empty:
                self._in_flight.append((plan, plan.scheduled, plan.fast.names() if plan.fast is not None else []))

    def _finish(self, fate: float) -> None:
        plan, shares, fast = self._in_flight.pop(0)
        tokens = {e.name: [next_token(e.name, e.computed_before + e.num_tokens) % 40] for e in shares if e.samples}
        if fate < 0.02:
            self._in_flight.clear()
            self._core.reset_sequences_of_lost_worker()
        elif fate < 0.04:
            self._note(self._core.fail_step(plan.step, "broken").ended)
        else:
            failed = {name: "not finite" for name in sorted(tokens)[:1] if fate < 0.10}
            tokens = {name: ids for name, ids in tokens.items() if name not in failed}
            # Some have costly grammars: they sit out steps beside those that have none.
            masks = {name: 0.02 for name in sorted(tokens) if name.startswith(("r3/", "r5/", "r8/"))}
            result = replace(self._result(plan, tokens, failed, fast), mask_s=masks, duration_s=0.004)
            outcome = self._core.update(result)
            self._note(outcome.runs, outcome.ended)

    def _result(
        self, plan: StepPlan, tokens: dict[str, list[int]], failed: dict[str, str], fast: list[str]
    ) -> StepResult:
        """Tokens of fast rows by name or as a column: it makes no difference."""
        if not fast or failed or plan.step % 2:
            return StepResult(plan.step, tokens, failed)
        column = np.array([tokens[name][0] for name in fast])
        others = {name: ids for name, ids in tokens.items() if name not in fast}
        return StepResult(plan.step, others, column=column)

    def _note(self, *facts: Any) -> None:
        state = self._core.state
        self.transcript.append(
            (
                *(list(fact) for fact in facts[:-1]),
                facts[-1],
                [group.request.request_id for group in (*state.waiting, *state.swapped)],
                [
                    (s.name, s.num_tokens, s.num_computed_tokens, s.num_placeholders)
                    for group in state.running
                    for s in group.sequences
                ],
                self._core.pool_report().gpu,
                canonical(self._core.block_tables()),
            )
        )


def canonical(tables: dict[str, list[str]]) -> dict[str, list[int]]:
    """Tables with blocks named in order of first occurrence."""
    names: dict[str, int] = {}
    return {name: [names.setdefault(b, len(names)) for b in tables[name]] for name in sorted(tables)}


def check(policy: str, seeds: range, num_acts: int, model: str = MODELS[0]) -> int:
    """Both lives of every seed are equal; how many shares were fast."""
    num_fast = 0
    for seed in seeds:
        fast, slow = (Life(make(policy, seed, fast_path=fast, model=model), seed) for fast in (True, False))
        for step, (a, b) in enumerate(zip(fast.live(num_acts), slow.live(num_acts), strict=True)):
            assert a == b, f"{model}, seed {seed}, note {step}"
        assert slow.num_fast == 0
        num_fast += fast.num_fast
    return num_fast


@pytest.mark.parametrize("policy", ["vllm-v1", "vllm-v1-async", "static", "quire"])
def test_a_life_is_the_same_with_the_fast_path_and_without(policy: str) -> None:
    """R127-R137, R149-R154 by columns: equal plans, ends, queues, counters, free blocks and tables."""
    assert check(policy, range(2), 100) > 50


@pytest.mark.parametrize("model", MODELS[1:])
@pytest.mark.parametrize("policy", ["vllm-v1", "vllm-v1-async", "static", "quire"])
def test_so_is_one_with_windows_groups_or_states(policy: str, model: str) -> None:
    """The same blocks are freed behind windows in the same order, and the same checkpoints are kept."""
    assert check(policy, range(4), 100, model) > 50


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("policy", ["vllm-v1", "vllm-v1-async", "static", "quire"])
def test_many_lives_are_the_same(policy: str, model: str) -> None:
    """The same for many more seeds."""
    assert check(policy, range(1_000, 1_100), 200, model) > 3_000
