"""The persistent batch: worker.proto's rules for rows, its checks, and that a refused step changes nothing."""

import copy
import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from svc_common.errors import InvalidArgument
from tests.support.worker.builders import Change, Row, step
from worker_svc.rows.table import ChangeLimits, RowTable

LIMITS = ChangeLimits(vocab_size=100, max_model_len=64, block_size=4, num_gpu_blocks=32, num_cpu_blocks=8, max_rows=128)


def table() -> RowTable:
    return RowTable(LIMITS)


def run(rows: RowTable, message: worker_pb2.SchedulerOutputs, token: int = 7) -> list[tuple[int, int, int, bool]]:
    batch = rows.apply(message)
    rows.commit(batch, np.full(len(batch.sampled_rows), token, np.int32))
    return [(w.row, w.start, w.num_tokens, w.samples) for w in batch.works()]


def test_prefill_then_repeats_without_being_mentioned() -> None:
    """worker.proto: a row that a step does not mention computes one token if it is decoding."""
    rows = table()
    assert run(rows, step(add=[Row(3, [1, 2, 3], [5], 3)])) == [(3, 0, 3, True)]
    assert run(rows, step()) == [(3, 3, 1, True)]
    assert run(rows, step(change=[Change(3, 1, [6])])) == [(3, 4, 1, True)]
    assert run(rows, step()) == [(3, 5, 1, True)]
    assert rows.row(3).token_ids == [1, 2, 3, 7, 7, 7, 7]
    assert rows.row(3).block_ids == [5, 6]
    assert rows.row(3).num_computed_tokens == 6


def test_cache_groups_have_block_tables_of_their_own() -> None:
    """common.proto, cache_windows: a place in a row's table has a block id for each group, in order."""
    rows = RowTable(dataclasses.replace(LIMITS, num_groups=3, max_model_len=128))
    assert run(rows, step(add=[Row(1, [1, 2, 3, 4, 5], [3, 5, 7, 4, 6, 8], 5)])) == [(1, 0, 5, True)]
    assert run(rows, step(change=[Change(1, 1)])) == [(1, 5, 1, True)]
    assert rows.block_tables[:, 1, :2].tolist() == [[3, 4], [5, 6], [7, 8]]
    run(rows, step(add=[Row(70, [9] * 77, [9] * 60, 77)]))  # more rows and places than there were
    batch = rows.apply(step(change=[Change(1, 1, [10, 20, 30])]))
    packed = rows.pack(batch)
    assert packed.slots[:, packed.token_rows == 1].tolist() == [[4 * 4 + 3], [6 * 4 + 3], [8 * 4 + 3]]
    assert rows.row(1).block_ids == [3, 5, 7, 4, 6, 8, 10, 20, 30]
    rows.void(batch)


def test_blocks_are_counted_in_places_of_all_groups() -> None:
    """Too few for the tokens, or not the same number for each group: refused, with nothing changed."""
    rows = RowTable(dataclasses.replace(LIMITS, num_groups=2))
    for field, message in (
        ("added.num_blocks", step(add=[Row(0, [1], [5], 1)])),
        ("added.num_blocks", step(add=[Row(0, [1] * 5, [5, 6], 5)])),
    ):
        with pytest.raises(InvalidArgument, match=field.replace(".", r"\.")):
            rows.apply(message)
    run(rows, step(add=[Row(0, [1], [5, 6], 1)]))
    with pytest.raises(InvalidArgument, match=r"changed\.num_new_blocks.*not a multiple of the model's 2 cache groups"):
        rows.apply(step(change=[Change(0, 1, [7])]))
    assert run(rows, step()) == [(0, 1, 1, True)]


def test_chunked_prefill_computes_nothing_unless_mentioned() -> None:
    """A chunk that stops one short of the end is not decoding, though one token is left."""
    rows = table()
    assert run(rows, step(add=[Row(0, [1] * 8, [0, 1], 3)])) == [(0, 0, 3, False)]
    assert run(rows, step()) == []
    assert run(rows, step(change=[Change(0, 4)])) == [(0, 3, 4, False)]
    assert run(rows, step()) == []
    assert run(rows, step(change=[Change(0, 1)])) == [(0, 7, 1, True)]
    assert rows.row(0).repeats


def test_pause_lasts_until_the_next_mention() -> None:
    rows = table()
    run(rows, step(add=[Row(0, [1], [0], 1), Row(1, [1], [1], 1)]))
    assert run(rows, step(change=[Change(0, 0)])) == [(1, 1, 1, True)]
    assert run(rows, step()) == [(1, 2, 1, True)]
    assert run(rows, step(change=[Change(0, 1)])) == [(0, 1, 1, True), (1, 3, 1, True)]


def test_removed_rows_go_first_so_an_index_can_be_used_again_at_once() -> None:
    rows = table()
    run(rows, step(add=[Row(0, [1, 2], [0], 2)]))
    again = Row(0, [9], [1], 1, incarnation=2)
    assert run(rows, step(remove=[0], add=[again])) == [(0, 0, 1, True)]
    assert rows.row(0).token_ids == [9, 7]


def test_prefix_hit_starts_after_the_computed_tokens() -> None:
    assert run(table(), step(add=[Row(0, [1] * 6, [0, 1], 2, num_computed=4)])) == [(0, 4, 2, True)]


def test_added_paused_row_computes_nothing() -> None:
    rows = table()
    assert run(rows, step(add=[Row(0, [1], [0], 0)])) == []
    assert run(rows, step()) == []


def test_a_copy_of_the_block_tables_is_told_of_each_new_block_once() -> None:
    """Those of added rows and those that rows grew by; of an index that is used again, all; after a reset, those of later rows."""
    rows = table()

    def told() -> list[tuple[int, int, int]]:
        at, places = rows.new_blocks()
        assert [x.tolist() for x in rows.new_blocks()] == [at.tolist(), places.tolist()], "told until they are copied"
        rows.copied_blocks()
        return list(zip(at.tolist(), places.tolist(), rows.block_tables[0, at, places].tolist(), strict=True))

    run(rows, step(add=[Row(0, [1] * 6, [8, 9], 6), Row(2, [1], [3], 1)]))
    assert told() == [(0, 0, 8), (0, 1, 9), (2, 0, 3)]
    assert told() == []
    run(rows, step(change=[Change(2, 1, [5, 6])]))
    run(rows, step(change=[Change(2, 1, [7])], remove=[0], add=[Row(0, [1], [4], 1, incarnation=2)]))
    assert told() == [(0, 0, 4), (2, 1, 5), (2, 2, 6), (2, 3, 7)]
    run(rows, step(add=[Row(100, [1], [10], 1)]))
    assert told() == [(100, 0, 10)]
    rows.reset()
    run(rows, step(add=[Row(2, [1], [11], 1)]))
    assert told() == [(2, 0, 11)]


def test_row_that_is_not_finite_gets_no_token_and_stays_silent() -> None:
    rows = table()
    batch = rows.apply(step(add=[Row(0, [1], [0], 1), Row(1, [1], [1], 1)]))
    rows.commit(batch, np.array([7, 8], np.int32), np.array([False, True]))
    assert rows.row(0).token_ids == [1]
    assert run(rows, step()) == [(1, 1, 1, True)]
    assert run(rows, step(change=[Change(0, 1, [5])])) == [(1, 2, 1, True)], "planned before its failure was known"
    assert run(rows, step(remove=[0], add=[Row(0, [4], [0], 1, incarnation=2)])) == [(0, 0, 1, True), (1, 3, 1, True)]


def test_void_batch_keeps_counts_and_waits_to_be_mentioned() -> None:
    rows = table()
    run(rows, step(add=[Row(0, [1], [0], 1)]))
    rows.void(rows.apply(step()))
    assert run(rows, step()) == []
    assert run(rows, step(change=[Change(0, 1)])) == [(0, 1, 1, True)]


def test_multi_step_repeats_the_rows_that_got_a_token() -> None:
    """`num_decode_steps` decode steps for one message."""
    rows = table()
    batch = rows.apply(step(add=[Row(0, [1, 2], [0, 1], 2), Row(1, [1] * 5, [2, 3], 4)], num_decode_steps=3))
    starts = []
    for i in range(batch.num_decode_steps):
        batch = rows.next_decode(batch) if i else batch
        starts.append([(w.row, w.start) for w in batch.works()])
        rows.commit(batch, np.full(len(batch.sampled_rows), 7, np.int32))
    assert starts == [[(0, 0), (1, 0)], [(0, 2)], [(0, 3)]]
    assert rows.row(0).token_ids == [1, 2, 7, 7, 7]


def test_pack_gives_positions_and_slots() -> None:
    rows = table()
    batch = rows.apply(
        step(add=[Row(1, [10, 11, 12, 13, 14], [9, 3], 5), Row(4, [20, 21, 22], [6], 1, num_computed=1)])
    )
    packed = rows.pack(batch)
    assert packed.token_ids.tolist() == [10, 11, 12, 13, 14, 21]
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 1]
    assert packed.slots.tolist() == [[36, 37, 38, 39, 12, 25]]
    assert packed.row_offsets.tolist() == [0, 5, 6]
    assert packed.sampled_at.tolist() == [4]


def test_grows_beyond_its_first_arrays() -> None:
    rows = RowTable(ChangeLimits(100, 2_000, 4, 1_000, 0))
    run(rows, step(add=[Row(500, [1] * 1_990, range(500), 1_990)]))
    for _ in range(3):
        run(rows, step())
    assert rows.row(500).num_computed_tokens == 1_993
    assert rows.occupied_rows().tolist() == [500]


def base() -> RowTable:
    """Row 0 decodes with room for one more token, row 1 is in prefill, row 2 was used and is free."""
    rows = table()
    run(rows, step(add=[Row(0, [1, 2], [0], 2), Row(1, [1] * 9, [1, 2, 3], 4), Row(2, [1], [4], 1, incarnation=5)]))
    run(rows, step(remove=[2]))
    return rows


def with_column(message: worker_pb2.SchedulerOutputs, path: str, data: bytes) -> worker_pb2.SchedulerOutputs:
    part, _, name = path.rpartition(".")
    setattr(getattr(message, part) if part else message, name, data)
    return message


ONE = Row(7, [1, 2, 3], [8], 3)
I32, F32, U8 = wire_arrays.I32, wire_arrays.F32, wire_arrays.U8

BAD = [
    ("num_decode_steps", step(num_decode_steps=0)),
    ("num_decode_steps", step(num_decode_steps=65)),
    ("removed_rows", step(remove=[2])),
    ("removed_rows", step(remove=[90])),
    ("removed_rows", step(remove=[-1])),
    ("removed_rows", step(remove=[0, 0])),
    ("removed_rows", with_column(step(), "removed_rows", b"\1\2\3")),
    ("added.rows", step(add=[Row(0, [1], [8], 1, incarnation=9)])),
    ("added.rows", step(add=[Row(128, [1], [8], 1)])),
    ("added.rows", step(add=[ONE, ONE])),
    ("added.incarnations", step(add=[Row(2, [1], [8], 1, incarnation=5)])),
    ("added.incarnations", step(add=[Row(7, [1], [8], 1, incarnation=-1)])),
    ("added.incarnations", step(remove=[0], add=[Row(0, [1], [8], 1, incarnation=1)])),
    ("added.num_known_tokens", step(add=[Row(7, [], [8], 0)])),
    ("added.num_known_tokens", step(add=[Row(7, [1] * 65, range(8, 28), 1)])),
    ("added.num_prompt_tokens", step(add=[Row(7, [1, 2], [8], 1, num_prompt=3)])),
    ("added.num_prompt_tokens", step(add=[Row(7, [1, 2], [8], 1, num_prompt=0)])),
    ("added.token_ids", step(add=[Row(7, [1, 100], [8], 2)])),
    ("added.token_ids", step(add=[Row(7, [1, -1], [8], 2)])),
    ("added.token_ids", with_column(step(add=[ONE]), "added.token_ids", wire_arrays.pack([1, 2]))),
    ("added.num_computed_tokens", step(add=[Row(7, [1, 2], [8], 0, num_computed=2)])),
    ("added.num_tokens", step(add=[Row(7, [1, 2], [8], 2, num_computed=1)])),
    ("added.num_tokens", step(add=[Row(7, [1, 2], [8], -1)])),
    ("added.num_blocks", step(add=[Row(7, [1] * 5, [8], 5)])),
    ("added.num_blocks", step(add=[Row(7, [1] * 6, [8], 0, num_computed=5)])),
    ("added.num_blocks", step(add=[Row(7, [1, 2, 3], [8], 3)], change=[Change(0, 0)], num_decode_steps=3)),
    ("added.num_blocks", with_column(step(add=[ONE]), "added.num_blocks", wire_arrays.pack([1, 1]))),
    ("added.block_ids", step(add=[Row(7, [1], [32], 1)])),
    ("added.block_ids", step(add=[Row(7, [1], [-1], 1)])),
    ("added.block_ids", with_column(step(add=[ONE]), "added.block_ids", b"")),
    ("added.block_ids", with_column(step(add=[ONE]), "added.num_blocks", wire_arrays.pack([2**31 - 1]))),
    ("added.temperatures", with_column(step(add=[ONE]), "added.temperatures", wire_arrays.pack([float("nan")], F32))),
    ("added.temperatures", with_column(step(add=[ONE]), "added.temperatures", wire_arrays.pack([-1.0], F32))),
    ("added.top_ps", with_column(step(add=[ONE]), "added.top_ps", wire_arrays.pack([0.0], F32))),
    ("added.top_ps", with_column(step(add=[ONE]), "added.top_ps", wire_arrays.pack([1.5], F32))),
    ("added.top_ks", with_column(step(add=[ONE]), "added.top_ks", wire_arrays.pack([-1]))),
    ("added.seeds", with_column(step(add=[ONE]), "added.seeds", wire_arrays.pack([1]))),
    ("added.sequence_indexes", with_column(step(add=[ONE]), "added.sequence_indexes", wire_arrays.pack([-1]))),
    ("added.logprobs", with_column(step(add=[ONE]), "added.logprobs", b"")),
    ("changed.rows", step(change=[Change(2, 1)])),
    ("changed.rows", step(change=[Change(100, 1)])),
    ("changed.rows", step(change=[Change(0, 1), Change(0, 1)])),
    ("changed.rows", step(remove=[0], change=[Change(0, 1)])),
    ("changed.rows", step(add=[ONE], change=[Change(7, 1)])),
    ("changed.incarnations", step(change=[Change(0, 1, incarnation=2)])),
    ("changed.num_tokens", step(change=[Change(0, 2)])),
    ("changed.num_tokens", step(change=[Change(1, 6)])),
    ("changed.num_tokens", step(change=[Change(1, -1)])),
    ("changed.num_new_blocks", step(change=[Change(0, 1)], num_decode_steps=3)),
    ("changed.num_new_blocks", step(num_decode_steps=3)),
    ("changed.num_new_blocks", step(change=[Change(0, 1, range(32))])),
    ("changed.new_block_ids", step(change=[Change(0, 1, [32])])),
    ("changed.new_block_ids", step(change=[Change(0, 1, [-1])])),
    ("changed.new_block_ids", with_column(step(change=[Change(0, 1)]), "changed.new_block_ids", wire_arrays.pack([1]))),
    ("blocks_to_swap_in", step(swap_in=[(8, 0)])),
    ("blocks_to_swap_in", step(swap_in=[(0, 32)])),
    ("blocks_to_swap_out", step(swap_out=[(32, 0)])),
    ("blocks_to_copy", step(copy=[(0, 32)])),
    ("blocks_to_copy", with_column(step(), "blocks_to_copy", wire_arrays.pack([1]))),
]


def snapshot(rows: RowTable) -> list[object]:
    return [copy.deepcopy(rows.row(row)) for row in rows.occupied_rows().tolist()]


@pytest.mark.parametrize(("field", "message"), BAD, ids=[f"{i}-{field}" for i, (field, _) in enumerate(BAD)])
def test_bad_column_is_named_and_changes_nothing(field: str, message: worker_pb2.SchedulerOutputs) -> None:
    rows = base()
    before = snapshot(rows)
    with pytest.raises(InvalidArgument) as caught:
        rows.apply(message)
    assert [v.field for v in caught.value.violations] == [field]
    assert snapshot(rows) == before
    assert run(rows, step()) == [(0, 3, 1, True)], "the table goes on as if the step had never come"


def test_names_and_traces_must_fit() -> None:
    message = step(add=[ONE])
    message.added.names.append("too many")
    with pytest.raises(InvalidArgument, match=r"added\.names"):
        table().apply(message)
    message = step(add=[ONE])
    message.added.traces.add()
    message.added.traces.add()
    with pytest.raises(InvalidArgument, match=r"added\.traces"):
        table().apply(message)


def test_a_row_at_the_models_end_must_not_repeat() -> None:
    rows = table()
    run(rows, step(add=[Row(0, [1] * 64, range(16), 64)]))
    with pytest.raises(InvalidArgument, match="64 tokens; remove or pause"):
        rows.apply(step())
    assert run(rows, step(change=[Change(0, 0)])) == []


def test_reset_forgets_rows_and_incarnations() -> None:
    rows = base()
    rows.reset()
    assert rows.occupied_rows().tolist() == []
    assert run(rows, step(add=[Row(2, [1], [0], 1, incarnation=1)])) == [(2, 0, 1, True)]


def test_steady_decode_of_256_rows_costs_far_less_than_10_us_a_row() -> None:
    rows = RowTable(ChangeLimits(100, 1_000, 16, 20_000, 0))
    n = 256
    run(rows, step(add=[Row(i, [1] * 8, range(60 * i, 60 * i + 60), 8) for i in range(n)]))
    message, best = step(), 1.0
    for _ in range(50):
        begin = time.thread_time()
        batch = rows.apply(message)
        rows.pack(batch)
        rows.commit(batch, np.zeros(n, np.int32))
        best = min(best, time.thread_time() - begin)
    assert best < n * 10e-6 / 2


# --- against a naive model: one dict per row, the rules as sentences -------------------------------------------------


class Naive:
    def __init__(self) -> None:
        self.rows: dict[int, dict] = {}
        self.lives: dict[int, int] = {}

    def apply(self, adds: list[Row], changes: list[Change], removes: list[int]) -> list[tuple[int, int, int, bool]]:
        for row in removes:
            del self.rows[row]
        counts = {row: 1 for row, state in self.rows.items() if state["decoding"] and not state["paused"]}
        for add in adds:
            self.lives[add.row] = add.incarnation
            self.rows[add.row] = {
                "tokens": list(add.tokens),
                "blocks": list(add.blocks),
                "computed": add.num_computed,
                "decoding": False,
                "paused": False,
            }
            counts[add.row] = add.num_tokens
        for change in changes:
            self.rows[change.row]["blocks"] += change.new_blocks
            self.rows[change.row]["paused"] = change.num_tokens == 0
            counts[change.row] = change.num_tokens
        works = []
        for row, count in sorted(counts.items()):
            if count:
                works.append(self._compute(row, count))
        return works

    def _compute(self, row: int, count: int) -> tuple[int, int, int, bool]:
        state = self.rows[row]
        start = state["computed"]
        state["computed"] += count
        state["decoding"] = state["computed"] == len(state["tokens"])
        if state["decoding"]:
            state["tokens"].append((row * 31 + len(state["tokens"])) % 100)
        return (row, start, count, state["decoding"])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_equals_a_naive_model_on_random_steps(data: st.DataObject) -> None:
    rows, naive = RowTable(ChangeLimits(100, 40, 4, 500, 0)), Naive()
    for _ in range(data.draw(st.integers(1, 15))):
        adds, changes, removes = _random_step(data, naive)
        batch = rows.apply(step(add=adds, change=changes, remove=removes))
        expected = naive.apply(adds, changes, removes)
        assert [(w.row, w.start, w.num_tokens, w.samples) for w in batch.works()] == expected
        sampled = batch.sampled_rows
        rows.commit(batch, (sampled * 31 + rows.num_known[sampled]) % 100)
        for row, state in naive.rows.items():
            seen = rows.row(row)
            assert (seen.token_ids, seen.block_ids) == (state["tokens"], state["blocks"])
            assert (seen.num_computed_tokens, seen.repeats) == (
                state["computed"],
                state["decoding"] and not state["paused"],
            )


def _random_step(data: st.DataObject, naive: Naive) -> tuple[list[Row], list[Change], list[int]]:
    removes = [
        row for row, s in sorted(naive.rows.items()) if len(s["tokens"]) > 36 or data.draw(st.integers(0, 9)) == 0
    ]
    stay = [row for row in sorted(naive.rows) if row not in removes]
    changes = []
    for row in stay:
        state = naive.rows[row]
        left = len(state["tokens"]) - state["computed"]
        must = state["decoding"] and not state["paused"]
        full = state["computed"] + 1 > 4 * len(state["blocks"])
        if (must and full) or data.draw(st.booleans()):
            num_tokens = data.draw(st.integers(0, left))
            lacking = -(-(state["computed"] + num_tokens) // 4) - len(state["blocks"])
            new = data.draw(st.lists(st.integers(0, 499), min_size=max(lacking, 0), max_size=max(lacking, 0) + 2))
            changes.append(Change(row, num_tokens, new, naive.lives[row]))
    adds = []
    for row in data.draw(st.sets(st.integers(0, 80), max_size=3)):
        if row in stay:
            continue
        known = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=30))
        computed = data.draw(st.integers(0, len(known) - 1))
        num_tokens = data.draw(st.integers(0, len(known) - computed))
        need = -(-(computed + num_tokens) // 4)
        blocks = data.draw(st.lists(st.integers(0, 499), min_size=need, max_size=need + 2))
        life = naive.lives.get(row, 0) + data.draw(st.integers(1, 2))
        adds.append(Row(row, known, blocks, num_tokens, incarnation=life, num_computed=computed))
    return adds, changes, removes


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_bytes_in_any_column_are_refused_or_harmless(data: st.DataObject) -> None:
    """A bad step changes nothing and raises nothing but InvalidArgument."""
    rows = base()
    message = step(add=[ONE], change=[Change(1, 2, [9])], remove=[0], copy=[(1, 2)])
    names = [("added", f.name) for f in worker_pb2.AddedRows.DESCRIPTOR.fields if f.type == f.TYPE_BYTES]
    names += [("changed", f.name) for f in worker_pb2.ChangedRows.DESCRIPTOR.fields]
    names += [("", n) for n in ("removed_rows", "blocks_to_swap_in", "blocks_to_swap_out", "blocks_to_copy")]
    for part, name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
        words = st.lists(st.sampled_from([0, 1, 2, 7, 33, 2**31 - 1, -1, -(2**31)]), max_size=4).map(wire_arrays.pack)
        setattr(getattr(message, part) if part else message, name, data.draw(st.binary(max_size=17) | words))
    before = snapshot(rows)
    try:
        batch = rows.apply(message)
    except InvalidArgument:
        assert snapshot(rows) == before
    else:
        rows.pack(batch)
        rows.commit(batch, np.zeros(len(batch.sampled_rows), np.int32))
