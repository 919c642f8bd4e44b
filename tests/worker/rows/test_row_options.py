"""Options of rows, told tokens and drafts: what is refused and by which name, and how a row goes on after it yields."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from svc_common.errors import InvalidArgument
from tests.support.worker.builders import Change, Row, rare, step
from worker_svc.rows.options import NO_PROMPT_LOGPROBS, Rule
from worker_svc.rows.table import ChangeLimits, RowTable

LIMITS = ChangeLimits(vocab_size=100, max_model_len=64, block_size=4, num_gpu_blocks=64, num_cpu_blocks=8, max_rows=128)
PACK = wire_arrays.pack
F32 = wire_arrays.F32
Sampling = common_pb2.ResolvedSampling
JSON = common_pb2.GRAMMAR_KIND_JSON_SCHEMA


def table() -> RowTable:
    return RowTable(LIMITS)


def joining(options: worker_pb2.RowOptions, row: int = 0, **fields: object) -> Row:
    return Row(row, [1, 2, 3], range(8 * row, 8 * row + 8), 3, options=options, **fields)


BAD_OPTIONS = [
    ("sampling.min_p", rare(Sampling(min_p=-0.1))),
    ("sampling.min_p", rare(Sampling(min_p=1.5))),
    ("sampling.min_p", rare(Sampling(min_p=float("nan")))),
    ("sampling.repetition_penalty", rare(Sampling(repetition_penalty=-1))),
    ("sampling.repetition_penalty", rare(Sampling(repetition_penalty=float("inf")))),
    ("sampling.presence_penalty", rare(Sampling(presence_penalty=2.5))),
    ("sampling.presence_penalty", rare(Sampling(presence_penalty=float("nan")))),
    ("sampling.frequency_penalty", rare(Sampling(frequency_penalty=-2.5))),
    ("sampling.logit_bias_ids", rare(Sampling(logit_bias_ids=PACK([100]), logit_biases=PACK([1.0], F32)))),
    ("sampling.logit_bias_ids", rare(Sampling(logit_bias_ids=PACK([-1]), logit_biases=PACK([1.0], F32)))),
    ("sampling.logit_bias_ids", rare(Sampling(logit_bias_ids=PACK([5, 5]), logit_biases=PACK([1.0, 2.0], F32)))),
    ("sampling.logit_bias_ids", rare(Sampling(logit_bias_ids=b"abc"))),
    ("sampling.logit_biases", rare(Sampling(logit_bias_ids=PACK([5]), logit_biases=PACK([1.0, 2.0], F32)))),
    ("sampling.logit_biases", rare(Sampling(logit_bias_ids=PACK([5]), logit_biases=PACK([101.0], F32)))),
    ("sampling.logit_biases", rare(Sampling(logit_bias_ids=PACK([5]), logit_biases=PACK([float("nan")], F32)))),
    ("sampling.logit_biases", rare(Sampling(logit_bias_ids=PACK([5]), logit_biases=b"abc"))),
    ("sampling.allowed_token_ids", rare(Sampling(allowed_token_ids=PACK([3, 100])))),
    ("sampling.allowed_token_ids", rare(Sampling(allowed_token_ids=b"a"))),
    ("sampling.bad_words", rare(Sampling(bad_words=[common_pb2.TokenSequence(token_ids=PACK([1, 100]))]))),
    ("sampling.bad_words", rare(Sampling(bad_words=[common_pb2.TokenSequence()]))),
    ("sampling.num_top_logprobs", rare(Sampling(num_top_logprobs=21))),
    ("sampling.num_prompt_logprobs", rare(Sampling(num_prompt_logprobs=21))),
    ("sampling.num_prompt_logprobs", rare(Sampling(num_prompt_logprobs=1), task=common_pb2.TASK_EMBED_LAST)),
    ("sampling.grammar.kind", rare(Sampling(grammar=common_pb2.Grammar(kind=77)))),
    ("min_tokens", rare(min_tokens=2**31)),
    ("min_tokens_ids", rare(min_tokens=1, min_tokens_ids=PACK([100]))),
    ("num_children", rare(num_children=65_537)),
    ("num_children", rare(num_children=2, num_candidates=4)),
    ("num_candidates", rare(num_candidates=101)),
    ("adapter_id", rare(adapter_id=2**31)),
    ("task", rare(task=99)),
    ("task", rare(task=common_pb2.TASK_EMBED_MEAN, num_candidates=4)),
    ("task", rare(task=common_pb2.TASK_EMBED_MEAN, num_children=4)),
]


@pytest.mark.parametrize(("field", "options"), BAD_OPTIONS, ids=[f"{i}-{f}" for i, (f, _) in enumerate(BAD_OPTIONS)])
def test_bad_option_is_named_with_its_row_and_changes_nothing(field: str, options: worker_pb2.RowOptions) -> None:
    rows = table()
    rows.commit(rows.apply(step(add=[Row(5, [1], [50, 51], 1)])), np.array([7], np.int32))
    with pytest.raises(InvalidArgument, match="row 3: ") as caught:
        rows.apply(step(add=[joining(options, row=3)]))
    assert [v.field for v in caught.value.violations] == [f"added.options.{field}"]
    assert rows.occupied_rows().tolist() == [5]
    assert [w.row for w in rows.apply(step()).works()] == [5]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_random_options_are_refused_or_harmless(data: st.DataObject) -> None:
    """Nothing but InvalidArgument, and then nothing has changed."""
    numbers = st.sampled_from([0, 1, 3, 21, 101, 2**31 - 1, 2**32 - 1])
    floats = st.floats(width=32)
    runs = st.binary(max_size=9) | st.lists(st.integers(-1, 101), max_size=3).map(PACK)
    sampling = Sampling(
        min_p=data.draw(floats),
        repetition_penalty=data.draw(floats),
        frequency_penalty=data.draw(floats),
        logit_bias_ids=data.draw(runs),
        logit_biases=data.draw(st.binary(max_size=9)),
        allowed_token_ids=data.draw(runs),
        bad_words=[common_pb2.TokenSequence(token_ids=word) for word in data.draw(st.lists(runs, max_size=2))],
        num_top_logprobs=data.draw(numbers),
        num_prompt_logprobs=data.draw(numbers),
    )
    fields = ("min_tokens", "num_children", "num_candidates", "adapter_id")
    given_options = rare(sampling, min_tokens_ids=data.draw(runs), **{name: data.draw(numbers) for name in fields})
    rows = table()
    try:
        batch = rows.apply(step(add=[joining(given_options)]))
    except InvalidArgument as error:
        assert error.violations[0].field.startswith("added.options.")
        assert not len(rows.occupied_rows())
    else:
        assert rows.pack(batch).token_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize("ats", [[1], [0, 0], [2, 1]])
def test_options_must_point_at_added_rows_in_ascending_order(ats: list[int]) -> None:
    message = step(add=[joining(rare(), row=row) for row in range(1 if ats == [1] else 3)])
    del message.added.options[:]
    message.added.options.extend(worker_pb2.RowOptions(at=at) for at in ats)
    with pytest.raises(InvalidArgument) as caught:
        table().apply(message)
    assert [v.field for v in caught.value.violations] == ["added.options.at"]


def test_a_guard_can_refuse_rows_before_anything_is_written() -> None:
    rows = table()

    def refuse(added: np.ndarray, num_computed: np.ndarray, options: object) -> None:
        raise InvalidArgument.field("added.options.adapter_id", f"row {added[0]} {num_computed[0]}")

    rows.guard(refuse)
    with pytest.raises(InvalidArgument, match="adapter_id"):
        rows.apply(step(add=[joining(rare(adapter_id=3))]))
    assert not len(rows.occupied_rows())


def test_options_become_columns_and_leave_with_the_row() -> None:
    """A row used again has none of the options of its last life; growing keeps those of others."""
    rows = table()
    sampling = Sampling(min_p=0.25, repetition_penalty=1.5, num_top_logprobs=3, num_prompt_logprobs=0)
    sampling.bad_words.add(token_ids=PACK([4, 5, 6]))
    sampling.bad_words.add(token_ids=PACK([9]))
    given = rare(sampling, min_tokens=4, min_tokens_ids=PACK([0]), adapter_id=6)
    rows.commit(rows.apply(step(add=[joining(given), joining(rare(), row=1)])), np.array([7, 7], np.int32))
    rows.commit(rows.apply(step(add=[Row(100, [1], [60], 1)])), np.full(3, 7, np.int32))
    o = rows.options
    assert (o.min_ps[0], o.repetition_penalties[0], o.num_tops[0], o.num_prompt_tops[0]) == (0.25, 1.5, 3, 0)
    assert (o.min_tokens[0], o.adapter_ids[0], o.num_children[0]) == (4, 6, 1)
    assert Rule(int(o.rules[0])) == Rule.BAD_WORDS | Rule.MIN_TOKENS | Rule.PENALTY
    words = o.extras[0].bad_words
    assert (words.lasts.tolist(), words.sizes.tolist(), words.before.tolist()) == ([6, 9], [2, 0], [4, 5])
    for row in (1, 100):
        assert (o.repetition_penalties[row], o.num_prompt_tops[row], o.rules[row]) == (1, NO_PROMPT_LOGPROBS, 0)
    again = Row(0, [1], [0], 1, incarnation=2)
    rows.commit(rows.apply(step(remove=[0], add=[again])), np.full(3, 7, np.int32))
    assert (o.min_ps[0], o.rules[0], o.extras[0], o.adapter_ids[0]) == (0, 0, None, 0)


def test_off_values_are_no_rules() -> None:
    rows = table()
    off = Sampling(repetition_penalty=1, grammar=common_pb2.Grammar(text="kind says none"))
    rows.apply(step(add=[joining(rare(off, min_tokens=3)), joining(rare(Sampling(), num_children=1), row=1)]))
    assert not rows.options.rules[:2].any()


def test_adapters_of_packed_tokens() -> None:
    rows = table()
    packed = rows.pack(rows.apply(step(add=[joining(rare(adapter_id=2)), joining(rare(), row=1)])))
    assert packed.adapter_ids is not None
    assert packed.adapter_ids.tolist() == [2, 2, 2, 0, 0, 0]
    assert table().pack(table().apply(step())).adapter_ids is None


# --- how rows go on --------------------------------------------------------------------------------------------------


def test_children_are_born_at_the_first_sample_and_the_row_goes_on_with_the_first() -> None:
    rows = table()
    batch = rows.apply(step(add=[joining(rare(num_children=3)), joining(rare(), row=1)]))
    rows.commit(batch, np.array([11, 12, 13, 21], np.int32), counts=np.array([3, 1], np.int32))
    assert rows.row(0).token_ids == [1, 2, 3, 11]
    assert rows.row(1).token_ids == [1, 2, 3, 21]
    assert rows.options.num_children[:2].tolist() == [1, 1]
    assert [(w.row, w.start, w.num_tokens) for w in rows.apply(step()).works()] == [(0, 3, 1), (1, 3, 1)]


def test_a_beam_waits_until_it_is_told_its_token() -> None:
    rows = table()
    none = np.zeros(0, np.int32)
    rows.commit(rows.apply(step(add=[joining(rare(num_candidates=4))])), none, counts=np.array([0], np.int32))
    assert not rows.row(0).repeats
    idle = rows.apply(step())
    assert not len(idle.rows)
    rows.commit(idle, none)
    batch = rows.apply(step(change=[Change(0, 1, told=[42])]))
    assert [(w.start, w.num_tokens, w.samples) for w in batch.works()] == [(3, 1, True)]
    assert rows.pack(batch).token_ids.tolist() == [42]
    rows.commit(batch, none, counts=np.array([0], np.int32))
    assert rows.row(0).token_ids == [1, 2, 3, 42]


def test_a_row_with_a_task_yields_nothing_and_is_over() -> None:
    rows = table()
    batch = rows.apply(step(add=[joining(rare(task=common_pb2.TASK_EMBED_MEAN))]))
    assert (batch.samples.tolist(), batch.reaches_end.tolist()) == ([False], [True])
    assert not len(rows.pack(batch).sampled_at)
    rows.commit(batch, np.zeros(0, np.int32))
    assert not len(rows.apply(step()).rows)


def decoding() -> RowTable:
    rows = table()
    rows.commit(rows.apply(step(add=[joining(rare()), joining(rare(), row=1)])), np.array([50, 60], np.int32))
    return rows


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_drafts_are_computed_and_the_row_goes_on_after_those_accepted(accepted: int) -> None:
    """R150, R151: the worker fills in the drafts; rejected ones do not count as computed."""
    rows = decoding()
    batch = rows.drafted(rows.apply(step(change=[Change(0, 4, num_drafts=3)])), [np.array([51, 52, 53], np.int32)])
    packed = rows.pack(batch)
    assert packed.token_ids.tolist() == [50, 51, 52, 53, 60]
    assert packed.positions.tolist() == [3, 4, 5, 6, 3]
    assert packed.sampled_at.tolist() == [0, 1, 2, 3, 4]
    tokens = [*[51, 52, 53][:accepted], 99]
    rows.commit(batch, np.array([*tokens, 61], np.int32), counts=np.array([len(tokens), 1], np.int32))
    state = rows.row(0)
    assert state.token_ids == [1, 2, 3, 50, *tokens]
    assert state.num_computed_tokens == 4 + accepted
    assert [(w.row, w.start, w.num_tokens) for w in rows.apply(step()).works()] == [(0, 4 + accepted, 1), (1, 4, 1)]


def test_a_row_with_fewer_guesses_computes_fewer_tokens() -> None:
    rows = decoding()
    batch = rows.apply(step(change=[Change(0, 4, num_drafts=3), Change(1, 3, num_drafts=2)]))
    batch = rows.drafted(batch, [np.zeros(0, np.int32), np.array([61], np.int32)])
    assert [(w.row, w.start, w.num_tokens, w.samples) for w in batch.works()] == [(0, 3, 1, True), (1, 3, 2, True)]
    rows.commit(batch, np.array([51, 61, 62], np.int32), counts=np.array([1, 2], np.int32))
    assert rows.row(0).token_ids == [1, 2, 3, 50, 51]
    assert rows.row(1).token_ids == [1, 2, 3, 60, 61, 62]
    assert rows.row(1).num_computed_tokens == 5


def beam_and_others() -> RowTable:
    """Row 0 decodes, row 1 is a beam, row 2 has children to come, row 3 is in prefill."""
    rows = table()
    joins = [
        joining(rare()),
        joining(rare(num_candidates=2), row=1),
        Row(2, [1, 2, 3], range(16, 20), 2, options=rare(num_children=2)),
        Row(3, [1] * 6, range(24, 30), 2),
    ]
    rows.commit(rows.apply(step(add=joins)), np.array([50], np.int32), counts=np.array([1, 0], np.int32))
    return rows


def with_changed(name: str, data: bytes) -> worker_pb2.SchedulerOutputs:
    message = step(change=[Change(1, 1, told=[5])])
    setattr(message.changed, name, data)
    return message


BAD_CHANGES = [
    ("num_new_tokens", step(change=[Change(0, 1, told=[5])])),
    ("num_new_tokens", step(change=[Change(1, 1, told=[5] * 62)])),
    ("num_new_tokens", with_changed("num_new_tokens", PACK([1, 1]))),
    ("num_new_tokens", with_changed("num_new_tokens", PACK([-1]))),
    ("new_token_ids", with_changed("new_token_ids", PACK([5, 5]))),
    ("new_token_ids", with_changed("num_new_tokens", PACK([2**31 - 1]))),
    ("new_token_ids", with_changed("new_token_ids", PACK([100]))),
    ("new_token_ids", with_changed("new_token_ids", PACK([-1]))),
    ("num_tokens", step(change=[Change(1, 2, told=[5])])),
    ("num_tokens", step(change=[Change(0, 4, num_drafts=2)])),
    ("num_draft_tokens", step(change=[Change(0, 1, num_drafts=2)])),
    ("num_draft_tokens", step(change=[Change(0, 1, num_drafts=1)])),
    ("num_draft_tokens", with_changed("num_draft_tokens", PACK([-1]))),
    ("num_draft_tokens", with_changed("num_draft_tokens", PACK([0, 0]))),
    ("num_draft_tokens", step(change=[Change(3, 3, num_drafts=1)])),
    ("num_draft_tokens", step(change=[Change(1, 2, told=[5], num_drafts=1)])),
    ("num_draft_tokens", step(change=[Change(2, 2, num_drafts=1)])),
    ("num_new_blocks", step(change=[Change(0, 31, num_drafts=30)])),
    ("num_tokens", step(change=[Change(0, 62, range(32, 44), num_drafts=61)])),
]


@pytest.mark.parametrize(("field", "message"), BAD_CHANGES, ids=[f"{i}-{f}" for i, (f, _) in enumerate(BAD_CHANGES)])
def test_bad_change_is_named_and_changes_nothing(field: str, message: worker_pb2.SchedulerOutputs) -> None:
    rows = beam_and_others()
    before = [rows.row(row) for row in range(4)]
    with pytest.raises(InvalidArgument) as caught:
        rows.apply(message)
    assert [v.field for v in caught.value.violations] == [f"changed.{field}"]
    assert [rows.row(row) for row in range(4)] == before
