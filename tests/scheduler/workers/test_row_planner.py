"""The row planner says only what the worker cannot know, and that is enough: the worker's row table rebuilds every plan."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block_manager.cache_rules import StateBlocks, StateMoves
from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from scheduler_svc.core.plan import ScheduledSequence, StepPlan
from scheduler_svc.worker_values import RowSampling, WorkerResult
from scheduler_svc.workers.row_failures import NOT_FINITE
from scheduler_svc.workers.row_planner import RowPlanner
from svc_common import wire_arrays
from svc_common.errors import Internal, InvalidArgument
from tests.support.core.builders import answer, make_core, make_request
from worker_svc.rows.table import ChangeLimits, RowTable

BLOCK = 4
SAMPLING = RowSampling(temperature=0.5, top_p=0.9, top_k=3, seed=2**63 + 1)


def make_table() -> RowTable:
    return RowTable(
        ChangeLimits(vocab_size=2_000, max_model_len=512, block_size=BLOCK, num_gpu_blocks=100_000, num_cpu_blocks=8)
    )


def run_step(table: RowTable, message: worker_pb2.SchedulerOutputs, tokens: dict[str, int]) -> worker_pb2.WorkerOutputs:
    """The worker's part: applies a message, appends `tokens` by name, answers."""
    batch = table.apply(message)
    names = [table.row(int(row)).name for row in batch.sampled_rows]
    ids = np.array([tokens[name] for name in names], np.int32)
    lives = [table.row(int(row)).incarnation for row in batch.sampled_rows]
    table.commit(batch, ids)
    return worker_pb2.WorkerOutputs(
        step_id=message.step_id,
        epoch=message.epoch,
        rows=wire_arrays.pack(batch.sampled_rows),
        incarnations=wire_arrays.pack(lives),
        num_tokens=wire_arrays.pack([1] * len(names)),
        token_ids=wire_arrays.pack(ids),
        flags=bytes(len(names)),
        num_computed_tokens=batch.num_tokens,
    )


def shares_at_worker(table: RowTable, message: worker_pb2.SchedulerOutputs) -> dict[str, tuple[int, int, list[int]]]:
    """(start, tokens, blocks) by name, as the row table understands the message."""
    batch = table.apply(message)
    found = {table.row(w.row).name: (w.start, w.num_tokens, table.row(w.row).block_ids) for w in batch.works()}
    table.commit(batch, np.zeros(len(batch.sampled_rows), np.int32))
    return {name: share for name, share in found.items() if share[1]}


@dataclass
class Walk:
    """One sequence of a random walk over plans."""

    name: str
    known: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    fresh: bool = True


class PlanWalk:
    """Draws plans that obey the plan's contract and nothing more: any chunk, any pause, any leave and come back."""

    def __init__(self, data: st.DataObject, num_rows: int) -> None:
        self.data, self.num_rows = data, num_rows
        self.walks: dict[str, Walk] = {}
        self.next_block, self.next_name, self.step = 1, 0, 0

    def draw(self) -> StepPlan:
        self.step += 1
        plan = StepPlan(step=self.step, lane=0)
        for name in list(self.walks):
            fate = self.data.draw(st.sampled_from(["run", "run", "run", "run", "pause", "leave", "return"]))
            if fate in {"leave", "return"}:
                walk = self.walks.pop(name)
                if not walk.fresh:
                    plan.left.append(name)
                if fate == "return":
                    self.walks[name] = Walk(name, walk.known)
            elif fate == "run":
                plan.scheduled.append(self.schedule(self.walks[name]))
        while len(self.walks) < self.num_rows and self.data.draw(st.booleans()):
            self.next_name += 1
            walk = Walk(f"r{self.next_name}/0", list(range(self.data.draw(st.integers(1, 20)))))
            self.walks[walk.name] = walk
            plan.scheduled.append(self.schedule(walk))
        return plan

    def schedule(self, walk: Walk) -> ScheduledSequence:
        if walk.fresh:
            walk.computed = self.data.draw(st.integers(0, (len(walk.known) - 1) // BLOCK)) * BLOCK
        pending = len(walk.known) - walk.computed
        num_tokens = self.data.draw(st.integers(1, pending))
        need = -(-(walk.computed + num_tokens) // BLOCK) - len(walk.blocks)
        new = list(range(self.next_block, self.next_block + need))
        self.next_block += need
        walk.blocks += new
        samples = num_tokens == pending
        entry = ScheduledSequence(
            name=walk.name,
            request_id=walk.name[:-2],
            index=0,
            num_tokens=num_tokens,
            computed_before=walk.computed,
            new_block_ids=new,
            fresh=walk.fresh,
            resumed=False,
            samples=samples,
            is_prefill=num_tokens > 1,
            num_prompt_tokens=1,
            token_ids=list(walk.known) if walk.fresh else None,
        )
        walk.fresh = False
        walk.computed += num_tokens
        if samples:
            walk.known.append(0)
        return entry


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_the_row_table_rebuilds_every_plan(data: st.DataObject) -> None:
    """Feeding the messages to the worker's table gives exactly the plan's (sequence, start, tokens, blocks)."""
    walk = PlanWalk(data, num_rows=5)
    planner, table = RowPlanner(5), make_table()
    for _ in range(12):
        plan = walk.draw()
        message = planner.encode(plan, lambda request_id: SAMPLING)
        expected = {e.name: (e.computed_before, e.num_tokens, walk.walks[e.name].blocks) for e in plan.scheduled}
        assert shares_at_worker(table, message) == expected
        assert len(table.occupied_rows()) == planner.num_rows


def by_name(plan: StepPlan, result: WorkerResult) -> dict[str, list[int]]:
    """The tokens of a result, whichever way it has them; both ways in which it tells of a column say the same."""
    if result.plain is None:
        return result.result.tokens
    assert plan.fast is not None and result.result.column is not None and not plan.entries
    tokens = {name: [int(id_)] for name, id_ in zip(plan.fast.names(), result.result.column, strict=True)}
    assert tokens == dict(
        zip(result.plain.names, np.frombuffer(result.plain.token_ids, "<i4")[:, None].tolist(), strict=True)
    )
    return tokens


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.integers(10, 40))
def test_core_and_row_table_stay_in_step(seed: int, num_blocks: int) -> None:
    """With the real core short of blocks (preemption, chunking, aborts), tokens by row come back to the right sequences."""
    rng = np.random.default_rng(seed)
    core = make_core(num_gpu_blocks=num_blocks, max_num_batched_tokens=16, max_num_seqs=6)
    planner, table, num_added = RowPlanner(6), make_table(), 0
    for step in range(120):
        if step < 60 and rng.random() < 0.5:
            num_added += 1
            core.add(make_request(f"r{num_added}", int(rng.integers(1, 20)), int(rng.integers(1, 12))))
        if rng.random() < 0.1:
            core.abort([f"r{int(rng.integers(1, num_added + 2))}"])
        [plan] = core.schedule(float(step))
        if plan.is_empty and not plan.left:
            continue
        message = planner.encode(plan, lambda request_id: SAMPLING)
        expected = answer(plan)
        result = planner.decode(run_step(table, message, {name: ids[0] for name, ids in expected.tokens.items()}))
        assert result is not None and by_name(plan, result) == expected.tokens
        assert result.num_computed_tokens == plan.num_tokens
        core.update(result.result)
    assert planner.num_open == 0


def steady_state(num_seqs: int) -> tuple[RowPlanner, StepPlan]:
    """A planner whose worker decodes `num_seqs` sequences, and the plan that goes on with them."""
    core = make_core(
        num_gpu_blocks=4_000, max_num_seqs=num_seqs, max_num_batched_tokens=8 * num_seqs, max_model_len=512
    )
    planner = RowPlanner(num_seqs)
    for i in range(num_seqs):
        core.add(make_request(f"r{i}", 5, 100))
    for _ in range(2):
        [plan] = core.schedule(0.0)
        planner.encode(plan, lambda request_id: SAMPLING)
        core.update(answer(plan))
    return planner, core.schedule(0.0)[0]


def test_steady_decode_says_nothing() -> None:
    """The message's size does not grow with the batch: 4 or 256 decoding rows, the same few bytes."""
    sizes = []
    for num_seqs in (4, 256):
        planner, plan = steady_state(num_seqs)
        assert len(plan.scheduled) == num_seqs
        message = planner.encode(plan, lambda request_id: SAMPLING)
        assert not message.HasField("added") and not message.HasField("changed") and not message.removed_rows
        sizes.append(message.ByteSize())
    assert sizes[0] == sizes[1] < 20


def test_rows_carry_sampling_and_context() -> None:
    """A joining row brings its sampling, its seed in full width, and its request's context."""
    trace = common_pb2.TraceContext(traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    core, planner, table = make_core(), RowPlanner(4), make_table()
    core.add(make_request("a", 5))
    core.add(make_request("b", 5))
    options = {"a": SAMPLING, "b": RowSampling(0.0, 1.0, 0, 5, logprobs=True, trace=trace)}
    table.apply(planner.encode(core.schedule(0.0)[0], options.__getitem__))
    a, b = table.row(0), table.row(1)
    assert (a.name, a.seed, a.temperature, a.top_k, a.logprobs) == ("a/0", 2**63 + 1, 0.5, 3, False)
    assert (b.name, b.seed, b.logprobs) == ("b/0", 5, True)
    assert b.trace == trace


def result_of(
    message: worker_pb2.SchedulerOutputs, rows: list[tuple[int, int, int]], **values: object
) -> worker_pb2.WorkerOutputs:
    """A result with one token for each (row, incarnation, token)."""
    return worker_pb2.WorkerOutputs(
        step_id=message.step_id,
        epoch=message.epoch,
        rows=wire_arrays.pack([r for r, _, _ in rows]),
        incarnations=wire_arrays.pack([i for _, i, _ in rows]),
        num_tokens=wire_arrays.pack([1] * len(rows)),
        token_ids=wire_arrays.pack([t for _, _, t in rows]),
        flags=values.pop("flags", bytes(len(rows))),  # type: ignore[arg-type]
        **values,  # type: ignore[arg-type]
    )


def one_step_out() -> tuple[RowPlanner, worker_pb2.SchedulerOutputs]:
    """Rows 0 and 1 in their first life, step 1 unanswered."""
    core, planner = make_core(), RowPlanner(4, epoch=3)
    core.add(make_request("a", 5))
    core.add(make_request("b", 5))
    return planner, planner.encode(core.schedule(0.0)[0], lambda request_id: SAMPLING)


def test_results_of_past_lives_epochs_and_steps_are_dropped() -> None:
    """Stale incarnation: that row only. Other epoch, or a step that is answered: the whole result."""
    planner, message = one_step_out()
    assert planner.decode(_of_epoch(message, 2)) is None
    result = planner.decode(result_of(message, [(0, 7, 11), (1, 1, 12)]))
    assert result is not None and result.result.tokens == {"b/0": [12]}
    assert planner.decode(result_of(message, [(0, 1, 11)])) is None


def _of_epoch(message: worker_pb2.SchedulerOutputs, epoch: int) -> worker_pb2.WorkerOutputs:
    other = result_of(message, [(0, 1, 5)])
    other.epoch = epoch
    return other


def test_rows_that_were_not_finite_fail_alone() -> None:
    """NaN logits: the row has no token and a reason; its neighbour is not touched."""
    planner, message = one_step_out()
    outputs = result_of(message, [(1, 1, 12)])
    outputs.rows, outputs.incarnations = wire_arrays.pack([0, 1]), wire_arrays.pack([1, 1])
    outputs.num_tokens, outputs.flags = wire_arrays.pack([0, 1]), bytes([worker_pb2.ROW_FLAG_NOT_FINITE, 0])
    result = planner.decode(outputs)
    assert result is not None
    assert (result.result.failed, result.result.tokens) == ({"a/0": NOT_FINITE}, {"b/0": [12]})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows", b"abc"),
        ("incarnations", b""),
        ("num_tokens", wire_arrays.pack([1, 2])),
        ("flags", b""),
        ("logprobs", b"\0" * 12),
    ],
)
def test_columns_that_do_not_fit_are_refused(field: str, value: bytes) -> None:
    """A result whose columns disagree is refused by naming the column."""
    planner, message = one_step_out()
    outputs = result_of(message, [(0, 1, 5), (1, 1, 6)])
    setattr(outputs, field, value)
    with pytest.raises(InvalidArgument) as error:
        planner.decode(outputs)
    assert error.value.violations[0].field in {field, "token_ids"}


def test_a_plan_beyond_the_rows_is_our_bug() -> None:
    """More sequences than rows, or tokens missing for a newcomer: INTERNAL, nothing is sent."""
    core, planner = make_core(), RowPlanner(1)
    core.add(make_request("a", 5))
    core.add(make_request("b", 5))
    with pytest.raises(Internal, match="more than 1 sequences"):
        planner.encode(core.schedule(0.0)[0], lambda request_id: SAMPLING)


def entry(
    name: str, num_tokens: int, computed: int, token_ids: list[int] | None = None, **values: object
) -> ScheduledSequence:
    """A share that reaches the end of what is known."""
    return ScheduledSequence(
        name=name,
        request_id=name.partition("/")[0],
        index=0,
        num_tokens=num_tokens,
        computed_before=computed,
        new_block_ids=[1, 2] if token_ids else [],
        fresh=token_ids is not None,
        resumed=False,
        samples=True,
        is_prefill=False,
        num_prompt_tokens=3,
        token_ids=token_ids,
        **values,
    )


def test_a_preempted_sequence_keeps_its_late_token() -> None:
    """R154: a result of a step from before it left still finds it; one that could only be of before is forgotten then."""
    planner, table = RowPlanner(4), make_table()
    first = planner.encode(StepPlan(1, 0, [entry("a/0", 3, 0, [5, 6, 7])]), lambda _: SAMPLING)
    answers = [run_step(table, first, {"a/0": 9})]
    answers.append(run_step(table, planner.encode(StepPlan(2, 0, left=["a/0"]), lambda _: SAMPLING), {}))
    found = [planner.decode(message) for message in answers]
    assert [f.result.tokens for f in found if f is not None] == [{"a/0": [9]}, {}]
    assert not planner._known


def test_a_beam_is_told_its_token_once() -> None:
    """R94: the core's choice goes to the worker, but not to one that came back and got all of its tokens."""
    beam = RowSampling(0.0, 1.0, 0, 1, num_candidates=4)
    planner, table = RowPlanner(4), make_table()
    plans = [
        StepPlan(1, 0, [entry("a/0", 3, 0, [5, 6, 7])]),
        StepPlan(2, 0, [entry("a/0", 1, 3, told_token_ids=[8])]),
        StepPlan(3, 0, [entry("a/0", 4, 0, [5, 6, 7, 8, 9])], left=["a/0"]),
        StepPlan(4, 0, [entry("a/0", 1, 4, told_token_ids=[9])]),
        StepPlan(5, 0, [entry("a/0", 1, 5, told_token_ids=[10])]),
    ]
    known = []
    for plan in plans:
        batch = table.apply(planner.encode(plan, lambda _: beam))
        known.append(table.row(int(batch.rows[0])).token_ids)
        table.commit(batch, np.zeros(0, np.int32), counts=np.zeros(len(batch.sampled_rows), np.int32))
    assert known == [[5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 10]]


def test_states_to_read_and_to_keep_are_told_by_row() -> None:
    """A row that is not mentioned otherwise may keep a checkpoint, and one row several."""
    planner = RowPlanner(4)
    planner.encode(_of_states({"a/0": 0, "b/0": 0}, StateMoves()), lambda _: SAMPLING)
    moves = StateMoves(
        [StateBlocks("c/0", 8, (5, 6))],
        [StateBlocks("b/0", 9, (7, 8)), StateBlocks("c/0", 16, (9, 10)), StateBlocks("c/0", 12, (11, 12))],
    )
    message = planner.encode(_of_states({"b/0": 8, "c/0": 8}, moves), lambda _: SAMPLING)
    told = [
        [wire_arrays.unpack(getattr(states, name), name).tolist() for name in ("rows", "num_tokens", "block_ids")]
        for states in (message.states_to_read, message.states_to_keep)
    ]
    assert told == [[[2], [8], [5, 6]], [[1, 2, 2], [9, 16, 12], [7, 8, 9, 10, 11, 12]]]
    silent = planner.encode(_of_states({"b/0": 9}, StateMoves()), lambda _: SAMPLING)
    assert not silent.HasField("states_to_read") and not silent.HasField("states_to_keep")


def _of_states(computed: dict[str, int], moves: StateMoves) -> StepPlan:
    """A plan of sequences that have so many tokens computed; each has 8 new ones at its start, then one."""
    plan = StepPlan(step=1, lane=0, states=moves)
    for name, before in computed.items():
        is_new = name == "c/0" or not before
        plan.entries.append(
            ScheduledSequence(
                name=name,
                request_id=name[:-2],
                index=0,
                num_tokens=8 if is_new else 1,
                computed_before=before,
                new_block_ids=[1, 2] if is_new else [],
                fresh=is_new,
                resumed=False,
                samples=True,
                is_prefill=is_new,
                num_prompt_tokens=8,
                token_ids=list(range(before + 8)) if is_new else None,
            )
        )
        plan.tickets.append(len(plan.tickets))
    return plan
