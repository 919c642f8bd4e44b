"""Random lives of a scheduler core: what happens to it, and what must hold after everything that does (R200, R201).

`Life` is driven by Hypothesis (shrinking) and by seeded random numbers (volume) alike: each event takes a `random.Random`.
"""

import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from block_manager.hashing import HashRename
from scheduler_svc.core.composition import live_change, presets
from scheduler_svc.core.limits import PoolSize
from scheduler_svc.core.plan import EndedSequence, SequenceTokens, StepOutcome, StepPlan, StepResult
from scheduler_svc.core.policies.chitu.scored import TOO_LARGE
from scheduler_svc.core.policies.vllm_v0.late_outputs import OneStepLate
from scheduler_svc.core.request import Group, QueueKind, Request, SequenceStatus
from scheduler_svc.core.request_rules import BeamRules, StopRules
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.workers import live_move
from svc_common.errors import DeadlineExceeded, OutOfRange
from tests.support.core.random_policies import Setting
from tests.support.core.worker_model import EOS, WorkerModel, candidates_at, guess_at, mix, token_at

EARLY_STOPPING: tuple[bool | str, ...] = (True, False, "never")
_LIVE = tuple(status for status in SequenceStatus if not status.is_finished)
MASK_S = 0.3
"""By which one mask of a costly grammar holds a step of one second up."""
FATES = ("ok",) * 12 + ("row fails", "row fails", "step fails")


Image = list[dict[int, int]]
"""What is in some blocks."""


@dataclass(slots=True)
class Underway:
    """A plan at the worker, and what it will answer; `error`: it failed."""

    plan: StepPlan
    result: StepResult
    error: bool


class Life:
    """One core, its worker, and the account of what was promised to clients. `num_steps`: plans so far.

    `salts`: of its requests, one of them each. `rename`: of tokens before they are hashed.
    """

    def __init__(
        self, setting: Setting, *, salts: Sequence[str] = ("", "", "x"), rename: HashRename | None = None
    ) -> None:
        self.setting = setting
        self.core = presets.build(setting.spec, setting.limits, pools=setting.pools, rename=rename)
        self._salts = salts
        self._rename = rename
        self.max_output = 10
        self.num_steps = 0
        self.seen: list[StepPlan] = []
        self.requests: dict[str, Request] = {}
        self._now = 0.0
        self.count = 0
        self._seeds: dict[str, int] = {}
        self._got: dict[str, list[int]] = {}
        self._over: dict[str, SequenceStatus] = {}
        self._dropped: set[str] = set()
        self._done: Counter[str] = Counter()
        self._rank_out: int | None = None
        self._draining: set[int] = set()
        self._moving: dict[str, tuple[int, int, int, Image]] = {}
        self.num_moved = 0
        self._underway: deque[Underway] = deque()
        self._granted: dict[int, list[str]] = {}
        self._num_granted: Counter[int] = Counter()
        self._granting: dict[int, StepPlan] = {}
        self.num_repeats = 0
        self._has_costly_masks = setting.limits.num_gpu_blocks % 2 == 0
        self._workers = [self._new_worker() for _ in range(self.core.num_workers)]

    def _new_worker(self) -> WorkerModel:
        has_blocks = self.setting.spec.cache != "none"
        size, num_states = self.setting.limits.block_size, self.setting.limits.num_state_blocks
        return WorkerModel(size, self.setting.windows, self._past, has_blocks=has_blocks, num_state_blocks=num_states)

    # --- what happens -------------------------------------------------------------------------------------------------

    def arrive(self, rng: random.Random) -> None:
        """A request; half of them share prompts with others."""
        limits, spec = self.setting.limits, self.setting.spec
        self.count += 1
        name = f"r{self.count}"
        length = rng.randint(1, limits.max_model_len - 1 if rng.random() < 0.3 else min(9, limits.max_model_len - 1))
        family = rng.choice([0, 0, 1, self.count + 5])
        prompt = [100 + mix(family, i) % 50 for i in range(length)]
        n = min(rng.choice([1, 1, 1, 1, 2, 3]), limits.max_num_seqs)
        best_of = min(n + rng.choice([0, 0, 0, 1]), limits.max_num_seqs)
        beam = None
        if best_of > 1 and rng.random() < 0.4:
            beam = BeamRules(rng.choice([0.0, 1.0, 2.0]), EARLY_STOPPING[rng.randrange(3)])
        max_tokens = rng.randint(1, self.max_output)
        stop = StopRules(
            max_tokens=max_tokens,
            min_tokens=min(rng.choice([0, 0, 3]), max_tokens),
            ignore_eos=rng.random() < 0.2,
            eos_token_ids=frozenset([EOS]),
            stop_token_ids=frozenset([rng.randint(1, 97)]) if rng.random() < 0.1 else frozenset(),
        )
        request = Request(
            name,
            prompt,
            stop,
            self._now,
            priority=rng.randint(0, 2),
            n=n,
            best_of=best_of,
            beam=beam,
            lora_id=rng.choice([0, 0, 1, 2, 3]) if spec.max_loras is not None else 0,
            cache_salt=rng.choice(self._salts),
            no_cache_reuse=rng.random() < 0.05,
            deadline=self._now + rng.choice([0.2, 3, 10, 40]) if spec.deadlines and rng.random() < 0.2 else None,
        )
        try:
            self.core.add(request)
        except DeadlineExceeded:
            assert request.deadline is not None
            return
        except OutOfRange:
            capacity = max(state.cache.capacity_tokens for state in self.core.states)
            assert length > min(limits.max_model_len - 1, capacity)
            return
        self.requests[name] = request
        self._seeds[name] = mix(self.count, length)
        for sequence in request.sequences:
            self._got[sequence.name] = []

    @property
    def plans(self) -> list[str]:
        """Every plan so far as text."""
        return [f"{p.scheduled} {p.swap_in} {p.swap_out} {p.copy} {p.left} {p.ended}" for p in self.seen]

    @property
    def can_schedule(self) -> bool:
        """A plan can go out. Plans that grant steps do not overlap."""
        if self._is_lockstep:
            return len(self._underway) < self.core.depth * len(self._workers)
        return bool(self._free_workers())

    @property
    def _is_lockstep(self) -> bool:
        """All workers are planned in one call, as ranks."""
        return self.core.has_worker_per_lane

    def _free_workers(self) -> list[int]:
        """Workers to which a plan can go out."""
        depth = 1 if self.setting.limits.max_granted_steps else self.core.depth
        busy = Counter(self._number_of(one.plan) for one in self._underway)
        return [w for w in range(len(self._workers)) if w != self._rank_out and busy[w] < depth]

    @property
    def num_workers(self) -> int:
        """Ranks, or one."""
        return len(self._workers)

    @property
    def num_underway(self) -> int:
        """Plans at the worker."""
        return len(self._underway)

    def schedule(self, fate: str) -> None:
        """A plan goes out and is executed in its turn; `fate`: how that goes. Of several workers one gets a plan as a rule."""
        worker = None if self._is_lockstep else self._next_worker()
        for plan in self.core.schedule(self._now, worker):
            number = self._number_of(plan)
            self._granted[number] = [entry.name for entry in plan.scheduled]
            self._num_granted[number] = plan.grant.num_steps if plan.grant is not None else 0
            self._granting[number] = plan
            assert not plan.is_repeat
            self._planned(plan, fate)
        self._now += 1.0

    def _next_worker(self) -> int | None:
        free = self._free_workers()
        is_for_all = len(free) == len(self._workers) and self.num_steps % 5 == 0
        return None if is_for_all else free[self.num_steps % len(free)] if free else 0

    def _planned(self, plan: StepPlan, fate: str) -> None:
        self.num_steps += 1
        self.seen.append(plan)
        self._check_plan(plan)
        self._note_ended(plan.ended)
        self._execute(plan, fate)

    def _repeat(self, worker: int) -> None:
        """The worker runs a granted step: one token of each sequence of the plan that granted it, as far as they live."""
        self._num_granted[worker] -= 1
        self.num_repeats += 1
        live = [name for name in self._granted[worker] if name not in self._over]
        plan = self.core.repeat(self._now, worker)
        assert plan.is_repeat and not (plan.preempted or plan.ended or plan.copy or plan.lookups)
        assert [e.name for e in plan.scheduled] == live
        assert all(e.num_tokens == 1 and e.samples and not (e.fresh or e.new_block_ids) for e in plan.scheduled)
        self._planned(plan, "row fails" if self.num_steps % 7 == 0 else "ok")
        self._now += 1.0

    def _goes_on(self, worker: int, result: StepResult) -> bool:
        """True if the worker begins another granted step. A revocation comes too late now and then."""
        if self.core.wants_step_back(worker) and self.num_steps % 4:
            self.core.revoke(worker)
            self._num_granted[worker] = 0
        granting = self._granting[worker]
        stops = granting.grant.stop_token_ids if granting.grant is not None else ()
        drawn = {token for tokens in result.tokens.values() for token in tokens}
        drawn.update(() if result.column is None else result.column.tolist())
        goes_on = drawn.isdisjoint(stops) and not (result.failed or result.mask_s)
        return self._num_granted[worker] > 0 and bool(drawn) and goes_on

    def _execute(self, plan: StepPlan, fate: str) -> None:
        error = fate == "step fails" and not plan.is_empty
        worker = self._worker_of(plan)
        assert plan.is_empty or self._number_of(plan) != self._rank_out, "it has no worker"
        result = worker.run(plan, self.requests, self._seeds, fails=error)
        if fate == "row fails" and plan.scheduled:
            name = plan.scheduled[plan.step % len(plan.scheduled)].name
            for part in (result.tokens, result.children, result.candidates):
                part.pop(name, None)
            result.failed[name] = "not finite"
        assert len(worker.held) <= self.setting.limits.max_num_seqs
        if self._has_costly_masks:
            result = replace(result, duration_s=1.0, mask_s=dict.fromkeys(self._costly(plan), MASK_S))
        if not plan.is_empty:
            self._underway.append(Underway(plan, result, error))

    def _costly(self, plan: StepPlan) -> list[str]:
        """Scheduled sequences of requests whose grammar masks hold steps up: a quarter of all requests."""
        return [e.name for e in plan.scheduled if e.samples and self._seeds[e.request_id] % 4 == 0]

    def _worker_of(self, plan: StepPlan) -> WorkerModel:
        return self._workers[self._number_of(plan)]

    def _number_of(self, plan: StepPlan) -> int:
        """Number of the worker that runs a plan."""
        return int(self.core.worker_of(plan.lane))

    def finish(self) -> None:
        """The oldest plan in flight comes back."""
        oldest = self._underway.popleft()
        if oldest.error:
            outcome = self.core.fail_step(oldest.plan.step, "broken")
            assert not outcome.runs
        else:
            outcome = self.core.update(oldest.result)
        self._worker_of(oldest.plan).told(oldest.plan.step)
        self._note(outcome, oldest.result)
        worker = self._number_of(oldest.plan)
        if not oldest.error and self._goes_on(worker, oldest.result):
            self._repeat(worker)

    def guess(self, rng: random.Random) -> None:
        """Drafts for sequences that decode, where the policy takes them from outside."""
        if self.setting.spec.progress != "at_schedule" or self._underway:
            return
        drafts = {}
        for group in [group for state in self.core.states for group in state.running]:
            if group.width == 1 and rng.random() < 0.5:
                s = group.live[0]
                seed = self._seeds[s.request.request_id]
                start = len(self._past(s.name))
                drafts[s.name] = [guess_at(seed, s.index, start + i) for i in range(rng.randint(1, 3))]
        self.core.put_drafts({**drafts, "nobody/0": [1]})

    def abort(self, which: int) -> None:
        """A client goes away; often one that is over or never was (R35, R198)."""
        self._note_ended(self.core.abort([f"r{which}", "nobody"]))

    def stop_string(self, which: int, index: int, num_output_tokens: int) -> None:
        """A stop string was found in what a sequence gave."""
        name = f"r{which}/{index}"
        ended = self.core.stop_at(name, num_output_tokens)
        for e in ended:
            del self._got[e.name][num_output_tokens:]
        self._note_ended(ended)

    def lose_worker(self) -> None:
        """The worker's process dies; another one takes its place. Of several workers one dies as a rule."""
        rank = self.num_steps % (len(self._workers) + 1)
        if len(self._workers) > 1 and rank < len(self._workers):
            self._lose_rank(rank, is_back=self.count % 2 == 0)
        else:
            self._lose_all()

    def _lose_rank(self, rank: int, *, is_back: bool) -> None:
        """Unless it is back at once, it is when the next one dies."""
        if self._rank_out is not None:
            self._bring_back(self._rank_out)
        self._num_granted[rank] = 0
        self._underway = deque(in_flight for in_flight in self._underway if self._number_of(in_flight.plan) != rank)
        self._workers[rank].lose_everything()
        self.core.reset_sequences_of_lost_worker(rank)
        self._rank_out = None if is_back else rank
        if is_back:
            self._bring_back(rank)

    def _bring_back(self, rank: int) -> None:
        """A lost worker comes back with an empty memory, as it was or as a new one."""
        if self._is_lockstep or self.count % 3:
            self.core.take_worker_back(rank)
        else:
            self._put(rank, self.core.pools[rank])

    def _put(self, number: int, pool: PoolSize) -> None:
        values = (number, pool, self.core.limits, self._rename)
        if isinstance(self.core, Scheduler):
            live_change.put_worker(self.core, *values)
        else:
            self.core.put_worker(*values)

    def change_workers(self, rng: random.Random) -> None:
        """An operator drains a worker group, moves its requests, ends a drain, or adds a worker group; mostly nothing happens."""
        dice, number = rng.random(), rng.randrange(self.num_workers)
        if self._is_lockstep or dice > 0.1 or number == self._rank_out:
            return
        if dice < 0.02 and self.num_workers < 4:
            self._join(PoolSize(self.setting.limits.num_gpu_blocks, self.setting.limits.num_cpu_blocks))
        elif dice < 0.05 and self.num_workers > 1:
            self.core.drain_worker(number)
            self._draining.add(number)
        elif dice < 0.07 and number in self._draining:
            self._move_all(number)
        elif number in self._draining and not self._replace(number):
            self._end_drain(number)

    def move_one(self, rng: random.Random) -> None:
        """A sequence is copied to another worker group in two phases, and goes on there; or that is given up midway."""
        if self._is_lockstep or self.num_workers == 1:
            return
        for name, (ticket, number, target, image) in list(self._moving.items()):
            found = live_move.residence(name, self.core.workers)
            if found is None or (found.worker, found.ticket) != (number, ticket) or rng.random() < 0.1:
                self.core.let_go(name)
                del self._moving[name]
            else:
                self.core.hold(name)
                if found.is_quiet:
                    self._hand_over(name, found.blocks, number, target, image)
        names = (
            []
            if rng.random() < 0.6
            else live_move.movable(self.core.workers[number := rng.randrange(self.num_workers)])
        )
        if names and (name := rng.choice(names)) not in self._moving:
            found = live_move.residence(name, self.core.workers)
            assert found is not None and found.worker == number
            copied = self._workers[number].copied(found.blocks[: found.num_full])
            target = rng.choice([w for w in range(self.num_workers) if w != number])
            self._moving[name] = found.ticket, number, target, copied

    def _hand_over(self, name: str, blocks: tuple[int, ...], number: int, target: int, image: Image) -> None:
        del self._moving[name]
        image = [*image, *self._workers[number].copied(blocks[len(image) :])]
        before, label = live_move.residence(name, self.core.workers), f"{name} {self.num_moved}"
        if target != self._rank_out and self.core.hand_over(name, target, label):
            self._workers[target].images[label] = image
            self.num_moved += 1
            assert name not in live_move.movable(self.core.workers[number])
        else:
            assert live_move.residence(name, self.core.workers) in (before, None)
            self.core.let_go(name)

    def _replace(self, number: int) -> bool:
        """A drained worker on which nothing runs any more is removed, and a new one comes in its place."""
        underway = any(self._number_of(one.plan) == number for one in self._underway)
        if underway or not self.core.states[number].is_idle:
            return False
        self.core.remove_worker(number)
        self._draining.discard(number)
        self._put(number, self.core.pools[number])
        self._workers[number].lose_everything()
        return True

    def _join(self, pool: PoolSize) -> None:
        self._put(self.num_workers, pool)
        self._workers.append(self._new_worker())

    def _move_all(self, number: int) -> None:
        """Its plans in flight are answered, and what they bring is ignored."""
        self.core.send_back(number, keep_movable=self.num_steps % 2 == 0)
        self._num_granted[number] = 0

    def _end_drain(self, number: int) -> None:
        self._draining.discard(number)
        self.core.take_worker_back(number)

    def _lose_all(self) -> None:
        self._rank_out = None
        self._draining.clear()
        self._num_granted.clear()
        self._underway.clear()
        for worker in self._workers:
            worker.lose_everything()
        self.core.reset_sequences_of_lost_worker()

    def reset_prefixes(self) -> None:
        """An operator asks for it (R142)."""
        self.core.reset_prefix_cache()

    def warm_up(self, *, on: bool) -> None:
        """The workers warm up, or are done with it."""
        self.core.warm_up(on=on)

    def drain(self) -> None:
        """All work ends with finite arrivals; then everything is free."""
        self.core.warm_up(on=False)
        for name in self._moving:
            self.core.let_go(name)
        if self._rank_out is not None:
            self._bring_back(self._rank_out)
            self._rank_out = None
        for number in sorted(self._draining):
            self._end_drain(number)
        for _ in range(self._most_steps()):
            if not (self.core.has_unfinished or self._underway):
                break
            self._go_on()
        assert not self.core.has_unfinished, "livelock"
        for worker in [None] if self._is_lockstep else range(len(self._workers)):
            for plan in self.core.schedule(self._now, worker):
                self._planned(plan, "ok")
        while self._underway:  # images of sequences that have ended are placed, as cached prefixes
            self.finish()
        self._check_end()

    def _go_on(self) -> None:
        if self.can_schedule:
            before = self.num_underway
            self.schedule("ok")
            if self.num_underway > before:
                return
        if self._underway:
            self.finish()
        self.check()

    def _most_steps(self) -> int:
        live = self.core.state.requests.values()
        turns = len(self.setting.spec.slot_sizes(self.setting.limits)) if self.setting.spec.phases == "skew" else 1
        turns *= len(self._workers)
        return turns * 200 + turns * 60 * sum(
            r.num_samples * (r.stop.max_tokens + len(r.prompt_token_ids)) for r in live
        )

    # --- what must hold -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """After everything that happens: the ledger adds up (R200), queues and places agree."""
        states = self.core.states
        shared = states[0].shared
        assert self.core.check_integrity() == []
        placed = {
            QueueKind.WAITING: list(shared.waiting),
            QueueKind.RUNNING: [g for state in states for g in state.running],
            QueueKind.SWAPPED: [g for state in states for g in state.swapped],
        }
        seen = [id(g) for groups in placed.values() for g in groups]
        assert len(set(seen)) == len(seen)
        for place, groups in placed.items():
            assert all(g.place is place for g in groups), place
            assert all(g.live for g in groups)
        late = self._late_groups()
        for state in states:
            assert all(g.worker == state.number for g in (*state.running, *state.swapped))
        for request in shared.requests.values():
            for group in request.groups:
                if not group.is_finished:
                    assert id(group) in seen or (group.place is QueueKind.NOWHERE and id(group) in late)
        assert shared.num_wide == sum(
            g.width > 1 and not g.is_finished for r in shared.requests.values() for g in r.groups
        )
        self._check_holders(states)

    def _check_holders(self, states: list[CoreState]) -> None:
        """Blocks and rows are those of unfinished sequences; none has blocks at two workers."""
        live = {s.name for r in states[0].requests.values() for s in r.unfinished}
        holders = [name for s in states for name in {*s.cache.ledger.tables, *s.cache.ledger.host_tables}]
        assert live.issuperset(holders), f"blocks of {sorted(set(holders) - live)}"
        assert len(set(holders)) == len(holders)
        several = len(states) > 1
        for state in states:
            workers = [self._workers[state.number]] if several else self._workers
            held = {name for worker in workers for name in worker.held if name not in state.left}
            assert held == set(state.on_worker)

    def _late_groups(self) -> set[int]:
        each = [getattr(worker._outputs, "_inner", worker._outputs) for worker in self.core.workers]
        return {id(s.group) for o in each if isinstance(o, OneStepLate) for s in o._open.values()}

    def _check_plan(self, plan: StepPlan) -> None:
        limits, states = self.setting.limits, self.core.states
        state = states[self._number_of(plan)] if len(states) > 1 else states[0]
        assert max(plan.num_batched_tokens, plan.num_tokens if self._is_v1 else 0) <= self._budget(plan)
        assert len(plan.scheduled) <= limits.max_num_seqs
        assert state.num_running_seqs <= limits.max_num_seqs
        assert not (plan.swap_in and plan.swap_out)
        assert len({e.name for e in plan.scheduled}) == len(plan.scheduled)
        for entry in plan.scheduled:
            assert entry.num_tokens > 0
            if self.setting.spec.cache != "none":
                assert entry.computed_before + entry.num_tokens <= state.cache.ledger.room(entry.name)
        self._check_groups(plan)

    def _budget(self, plan: StepPlan) -> int:
        """Chunked v0 never cuts or delays a running group of several sequences, as the reference has it (R87)."""
        wide = 0 if self._is_v1 else sum(len(g.live) for g in self._groups(plan) if len(g.live) > 1)
        chunked = self.setting.spec.phases == "decode_then_prefill"
        return self.setting.limits.max_num_batched_tokens + (wide if chunked else 0)

    @property
    def _is_v1(self) -> bool:
        return not self.setting.spec.is_v0

    def _check_groups(self, plan: StepPlan) -> None:
        """All live sequences of a group act together (R28); some may catch up first, but all give a token at once."""
        entries = {e.name: e for e in plan.scheduled}
        for group in self._groups(plan):
            live = [s.name for s in group.live]
            assert not live or {s.status for s in group.live} == {SequenceStatus.RUNNING}
            sampling = [name for name in live if name in entries and entries[name].samples]
            assert not sampling or sampling == live
            assert all(name in entries for name in live) or group.in_prefill or self._is_v1

    def _groups(self, plan: StepPlan) -> list[Group]:
        found = {}
        for entry in plan.scheduled:
            for group in self.requests[entry.request_id].groups:
                if any(s.name == entry.name for s in group.sequences):
                    found[id(group)] = group
        return list(found.values())

    # --- what clients got ---------------------------------------------------------------------------------------------

    def _past(self, name: str) -> list[int]:
        return self.requests[name.rpartition("/")[0]].prompt_token_ids + self._got[name]

    def _note(self, outcome: StepOutcome, result: StepResult) -> None:
        before = {name: len(tokens) for name, tokens in self._got.items()}
        taken: dict[str, list[int]] = {}
        for run in outcome.runs:
            source = run.forked_from or run.name
            if run.forked_from is not None:
                assert run.name not in self._got
                self._got[run.name] = self._got[source][: before[source]]
            got = self._got[run.name]
            assert run.name not in self._over
            assert run.offset == len(got), f"{run.name}: a token was lost or repeated"
            self._check_run(run, source, result, taken)
            got += run.token_ids
        for name in outcome.dropped:
            assert name not in self._over
            self._dropped.add(name)
        self._note_ended(outcome.ended)

    def _check_run(self, run: SequenceTokens, source: str, result: StepResult, taken: dict[str, list[int]]) -> None:
        """The tokens are the model's for that past, and each child has one of its own."""
        request, seed = self.requests[run.request_id], self._seeds[run.request_id]
        position = len(request.prompt_token_ids) + run.offset
        index = int(source.rpartition("/")[2])
        if source in result.tokens:
            assert run.token_ids == [token_at(seed, index, position + i) for i in range(len(run.token_ids))]
            return
        [token] = run.token_ids
        if source in result.children:
            choices = [token_at(seed, index, position, k) for k in range(request.num_samples)]
            assert token == choices[len(taken.setdefault(source, []))]
        else:
            choices = [t for t, _ in candidates_at(seed, index, position, request.num_samples)]
            assert token in choices
            assert token not in taken.setdefault(source, [])
        taken[source].append(token)

    def _note_ended(self, ended: Iterable[EndedSequence]) -> None:
        for e in ended:
            assert e.name not in self._over
            assert e.name not in self._dropped
            self._over[e.name] = e.status
            assert e.num_output_tokens == len(self._got[e.name])
            assert not self._done[e.request_id], "something ended after its request was done"
            self._done[e.request_id] += e.request_done
            self._check_reason(e)

    def _check_reason(self, e: EndedSequence) -> None:
        request = self.requests[e.request_id]
        limit = min(request.stop.max_tokens, self.core.state.max_total_tokens - len(request.prompt_token_ids))
        assert e.num_output_tokens <= limit
        if e.status is SequenceStatus.FINISHED_LENGTH_CAPPED:
            assert e.num_output_tokens == limit
        if e.stop_token_id is not None:
            assert self._got[e.name][-1] == e.stop_token_id
        if e.error == TOO_LARGE:
            self._check_too_large(e)

    def _check_too_large(self, e: EndedSequence) -> None:
        """A request that ends because the cache is too small for it must not fit into an empty one, with all of its group."""
        groups = self.requests[e.request_id].groups
        [group] = [g for g in groups if any(s.name == e.name for s in g.sequences)]
        pool, ledger = max(s.limits.num_gpu_blocks for s in self.core.states) - 1, self.core.state.cache.ledger
        together = [s for s in group.sequences if s.status in (SequenceStatus.FINISHED_IGNORED, *_LIVE)]
        num = len(together)
        assert sum(ledger.most_blocks(s.num_tokens, num) for s in together) > pool * num

    def _check_end(self) -> None:
        assert self._done == Counter(dict.fromkeys(self.requests, 1))
        assert set(self._got) == set(self._over) | self._dropped
        for name, request in self.requests.items():
            statuses = [self._over[s.name] for s in request.sequences]
            if (
                not {SequenceStatus.FINISHED_ABORTED, SequenceStatus.FINISHED_IGNORED} & {*statuses}
                and not request.beam
            ):
                assert len(statuses) == request.num_samples, name
        states, pool = self.core.states, self.core.pool_report()
        shared = states[0].shared
        assert pool.refs == {}
        assert (pool.gpu.free, pool.cpu.free) == (pool.gpu.total, pool.cpu.total)
        assert (list(shared.waiting), shared.finished, shared.num_wide) == ([], [], 0)
        assert not any(worker.held for worker in self._workers)
        assert not any(s.running or s.swapped or s.on_worker or s.left for s in states)
        assert not any(worker.flights for worker in self.core.workers)
