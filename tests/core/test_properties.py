"""Random lives of the core (Hypothesis): nothing leaks, nothing is lost or repeated, everything ends exactly once."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepPlan, StepResult
from scheduler_svc.core.request import SequenceStatus
from scheduler_svc.core.scheduler import Scheduler
from tests.core.builders import answer, make_core, make_request, next_token


class CoreMachine(RuleBasedStateMachine):
    """Arrivals, steps, aborts, failures and lost workers in any order, over a small pool (R200, R201)."""

    core: Scheduler

    @initialize(
        order=st.sampled_from(["fcfs", "priority"]),
        blocks=st.integers(3, 14),
        seqs=st.integers(1, 5),
        budget=st.integers(5, 20),
        caching=st.booleans(),
        threshold=st.sampled_from([0, 3]),
    )
    def build(self, order: str, blocks: int, seqs: int, budget: int, caching: bool, threshold: int) -> None:
        self.core = make_core(
            order,
            num_gpu_blocks=blocks,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=24,
            prefix_caching=caching,
            long_prefill_token_threshold=threshold,
        )
        self.count = 0
        self.prompts: dict[str, int] = {}
        self.got: dict[str, list[int]] = {}
        self.ended: Counter[str] = Counter()
        self.plan: StepPlan | None = None

    @rule(length=st.integers(1, 12), tokens=st.integers(1, 8), priority=st.integers(0, 2), alike=st.booleans())
    def arrive(self, length: int, tokens: int, priority: int, alike: bool) -> None:
        name = f"r{self.count}"
        self.count += 1
        prompt = [1 + i for i in range(length)] if alike else length
        if length > self.core.state.cache.capacity_tokens:
            return
        self.core.add(make_request(name, prompt, tokens, arrival=float(self.count), priority=priority))
        self.prompts[name] = length
        self.got[name] = []

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self) -> None:
        [plan] = self.core.schedule(float(self.count))
        self._note_ended(plan.ended)
        assert plan.num_tokens <= self.core.state.limits.max_num_batched_tokens
        assert len(self.core.state.running) <= self.core.state.limits.max_num_seqs
        for entry in plan.scheduled:
            held = len(self.core.block_tables()[entry.name]) * 4
            assert entry.computed_before + entry.num_tokens <= held
        self.plan = None if plan.is_empty else plan

    @precondition(lambda self: self.plan is not None)
    @rule(fate=st.sampled_from(["ok", "ok", "ok", "ok", "step fails", "row fails", "worker lost"]))
    def finish_step(self, fate: str) -> None:
        plan, self.plan = self.plan, None
        assert plan is not None
        if fate == "worker lost":
            self.core.reset_sequences_of_lost_worker()
        elif fate == "step fails":
            self._note(self.core.fail_step(plan.step, "broken"))
        else:
            result = answer(plan)
            if fate == "row fails" and result.tokens:
                name = min(result.tokens)
                del result.tokens[name]
                result = StepResult(plan.step, result.tokens, failed={name: "not finite"})
            self._note(self.core.update(result))

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        self._note_ended(self.core.abort([f"r{which}"]))

    @rule(which=st.integers(0, 30), offset=st.integers(1, 8))
    def stop_string(self, which: int, offset: int) -> None:
        ended = self.core.stop_at(f"r{which}/0", offset)
        for e in ended:
            del self.got[e.request_id][offset:]
        self._note_ended(ended)

    @invariant()
    def ledger_adds_up(self) -> None:
        assert self.core.check_integrity() == []

    def teardown(self) -> None:
        """All work ends with finite arrivals, even in a pool that barely holds one sequence; then everything is free."""
        for _ in range(3_000):
            if self.plan is not None:
                self.finish_step("ok")
            if not self.core.has_unfinished:
                break
            self.schedule()
        assert not self.core.has_unfinished, "livelock"
        assert self.ended == Counter(dict.fromkeys(self.prompts, 1))
        pool = self.core.pool_report()
        assert pool.gpu.free == pool.gpu.total
        assert pool.refs == {}
        assert self.core.check_integrity() == []

    def _note(self, outcome: StepOutcome) -> None:
        for run in outcome.runs:
            got = self.got[run.request_id]
            assert run.offset == len(got), "a token was lost or repeated"
            got += run.token_ids
            first = self.prompts[run.request_id] + run.offset
            assert run.token_ids == [next_token(run.name, first + i) for i in range(len(run.token_ids))]
        self._note_ended(outcome.ended)

    def _note_ended(self, ended: list[EndedSequence]) -> None:
        for e in ended:
            self.ended[e.request_id] += 1
            assert e.num_output_tokens == len(self.got[e.request_id])
            if e.status is SequenceStatus.FINISHED_LENGTH_CAPPED:
                assert e.error is None


CoreMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestCore = CoreMachine.TestCase
