"""Structured output on the worker without a model: masks, states of rows, drafts, failures (random logits, a real tokenizer)."""

import json
import random
import re
from collections.abc import Iterator

import numpy as np
import pytest

from protos.common.v1 import common_pb2
from tests.support.worker.grammar_rows import (
    EOS_IDS,
    VOCAB_SIZE,
    allowed,
    choice,
    draw,
    finish,
    ids_in,
    ids_of,
    json_schema,
    lark,
    new_masks,
    regex,
    text_of,
)
from worker_svc.sampling.grammar_masks import GrammarMasks
from worker_svc.sampling.token_masks import MaskAsk, num_words

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
EVERYTHING = set(range(VOCAB_SIZE))


@pytest.fixture(scope="module")
def masks() -> GrammarMasks:
    return new_masks()


@pytest.fixture(autouse=True)
def _no_rows(masks: GrammarMasks) -> Iterator[None]:
    yield
    masks.clear()


def test_regex_outputs_match_as_a_whole(masks: GrammarMasks) -> None:
    """Any drawn output matches the regular expression from its beginning to its end."""
    pattern = r"(cat|dog)s?: [0-9]{1,3}/[A-F]{2}"
    for i in range(20):
        masks.add(i, regex(pattern), [])
        assert re.fullmatch(pattern, text_of(finish(masks, i, random.Random(i))))


def test_choice_outputs_are_one_of_the_choices(masks: GrammarMasks) -> None:
    """Choices may begin alike and hold any character; over 60 draws each of them turns up, and nothing else."""
    texts = ["a", "ab", "abc", 'qu"o\\te', "new\nline", "日本語", "a | b", "[x]+"]
    found = set()
    for i in range(60):
        masks.add(i, choice(*texts), [])
        found.add(text_of(finish(masks, i, random.Random(i))))
    assert found == set(texts)


def test_lark_outputs_follow_the_grammar(masks: GrammarMasks) -> None:
    """Balanced brackets are beyond regular expressions."""
    masks.add(0, lark('start: "(" inner ")"\ninner: /[xy]{1,2}/ | "(" inner ")"'), [])
    text = text_of(finish(masks, 0, random.Random(3)))
    inner = text.strip("()")
    assert text.count("(") == text.count(")") >= 1 and re.fullmatch("[xy]{1,2}", inner)


def test_whitespace_between_json_tokens_is_bounded(masks: GrammarMasks) -> None:
    """Outside of strings whitespace is one blank, or a new line with at most 32 characters of indentation."""
    runs: set[str] = set()
    for i in range(40):
        masks.add(i, json_schema(SCHEMA), [])
        text = text_of(finish(masks, i, random.Random(i)))
        runs.update(re.findall(r"\s+", re.sub(r'"(\\.|[^"\\])*"', "string", text)))
    assert len(runs) > 3 and all(re.fullmatch(r" |\n[ \t]{0,32}", run) for run in runs)


def test_a_schema_may_say_its_own_whitespace(masks: GrammarMasks) -> None:
    """`x-guidance` of the schema wins over the bound."""
    schema = SCHEMA | {"x-guidance": {"whitespace_flexible": False}}
    for i in range(10):
        masks.add(i, json_schema(schema), [])
        text = text_of(finish(masks, i, random.Random(i)))
        assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False) or "\\" in text


def test_eos_is_allowed_only_where_the_grammar_accepts(masks: GrammarMasks) -> None:
    """Before the end of `a{2,3}`: no end-of-sequence id; where it may end: all of them; when complete: nothing else."""
    masks.add(0, regex("a{2,3}"), [])
    (a,) = ids_of("a")
    for num_taken, may_end in enumerate((False, False, True, True)):
        (ids,) = allowed(masks, 0)
        assert set(EOS_IDS) <= ids if may_end else not ids & set(EOS_IDS), num_taken
        assert (ids == set(EOS_IDS)) == (num_taken == 3), num_taken
        if num_taken < 3:
            masks.accept(0, [a])


@pytest.mark.parametrize("eos_id", EOS_IDS)
@pytest.mark.parametrize("pattern", ["a{2}", "a{2,3}"])
def test_an_ended_row_may_draw_anything(masks: GrammarMasks, pattern: str, eos_id: int) -> None:
    """After its end-of-sequence token a row's masks are ones, however the grammar came to its end and whatever follows."""
    masks.add(0, regex(pattern), ids_of("aa"))
    masks.accept(0, [eos_id])
    assert allowed(masks, 0) == [EVERYTHING]
    masks.accept(0, [77, 78])
    assert allowed(masks, 0) == [EVERYTHING]


def test_rebuilt_rows_have_the_same_masks(masks: GrammarMasks) -> None:
    """A row that joins with tokens of an earlier life goes on as the one that drew them, at every place, its end included."""
    rng = random.Random(5)
    masks.add(0, json_schema(SCHEMA), [])
    drawn: list[int] = []
    while not drawn or drawn[-1] not in EOS_IDS:
        masks.add(1, json_schema(SCHEMA), drawn)
        assert allowed(masks, 1) == allowed(masks, 0), text_of(drawn)
        masks.remove(1)
        drawn.append(draw(masks, 0, rng))
    masks.add(1, json_schema(SCHEMA), drawn)
    assert allowed(masks, 1) == allowed(masks, 0) == [EVERYTHING]


def test_tokens_told_before_the_first_mask_count(masks: GrammarMasks) -> None:
    """A row may commit tokens (a beam's) while its grammar is still being compiled."""
    masks.add(0, regex("[0-9]{3}x"), ids_of("1"))
    masks.accept(0, ids_of("2"))
    masks.accept(0, ids_of("3"))
    assert allowed(masks, 0) == [set(ids_of("x"))]


def test_drafts_are_tried_and_rolled_back(masks: GrammarMasks) -> None:
    """Line j is the mask that the row would have after j drafts; the row itself stays where it was."""
    text = '{"name": "ab", "age": 41}'
    drafts = ids_of(text)
    masks.add(0, json_schema(SCHEMA), [])
    before = allowed(masks, 0)
    lines = allowed(masks, 0, drafts)
    assert allowed(masks, 0) == before == lines[:1]
    for j in range(len(drafts) + 1):
        masks.add(1, json_schema(SCHEMA), drafts[:j])
        assert lines[j : j + 1] == allowed(masks, 1), text_of(drafts[:j])
        masks.remove(1)
    masks.accept(0, drafts[:3])
    assert allowed(masks, 0) == lines[3:4]


def test_refused_drafts_leave_the_row_unhurt(masks: GrammarMasks) -> None:
    """Masks up to the refused draft are right, and so is the row afterwards."""
    good, bad = ids_of('{"name'), ids_of("zzz")
    masks.add(0, json_schema(SCHEMA), [])
    plain = allowed(masks, 0, good)
    assert allowed(masks, 0, good + bad)[: len(good) + 1] == plain
    assert allowed(masks, 0, bad)[0] == plain[0]
    assert allowed(masks, 0, good) == plain


@pytest.mark.parametrize("pattern", ["ab", "ab+"])
def test_drafts_beyond_the_end_of_the_grammar(masks: GrammarMasks, pattern: str) -> None:
    """The line of a drafted end-of-sequence token allows it; after it anything goes."""
    drafts = [*ids_of("a"), *ids_of("b"), 1, 77]
    masks.add(0, regex(pattern), [])
    lines = allowed(masks, 0, drafts)
    assert 1 in lines[2]
    masks.accept(0, drafts[:2])
    assert allowed(masks, 0) == lines[2:3]
    masks.accept(0, drafts[2:])
    assert allowed(masks, 0) == [EVERYTHING]


def test_rows_of_one_step_do_not_disturb_each_other(masks: GrammarMasks) -> None:
    """32 rows in one call, some sharing a grammar, some with drafts, lines in any order: each mask is the one it has alone."""
    grammars = [json_schema(SCHEMA), regex("[a-z]{1,9}"), choice("yes", "no"), lark("start: /[0-9]+/")]
    starts = ['{"name"', "ab", "", "12"]
    for row in range(32):
        masks.add(row, grammars[row % 4], ids_of(starts[row % 4]))
    drafts = {row: ids_of("34") if row % 8 == 3 else [] for row in range(32)}
    alone = {row: allowed(masks, row, drafts[row]) for row in range(32)}
    asks, at = [], 0
    for row in random.Random(1).sample(range(32), 32):
        asks.append(MaskAsk(row, drafts[row], at))
        at += len(drafts[row]) + 2  # one line between them belongs to no row
    lines = np.full((at, num_words(VOCAB_SIZE)), 7, np.int32)
    masks.fill(asks, lines)
    for ask in asks:
        num_lines = len(ask.draft_ids) + 1
        assert [ids_in(line) for line in lines[ask.at : ask.at + num_lines]] == alone[ask.row]
        assert (lines[ask.at + num_lines] == 7).all()


@pytest.mark.parametrize(
    "bad",
    [
        regex("[a-"),
        lark("start: nothing"),
        lark("start: start"),
        choice(),
        json_schema({"type": "no such type"}),
        common_pb2.Grammar(
            kind=common_pb2.GRAMMAR_KIND_JSON_SCHEMA, text='{"const": 1} }, {"lark_grammar": "start: /x/"}'
        ),
        common_pb2.Grammar(kind=99, text="x"),  # type: ignore[arg-type]
    ],
    ids=["regex", "lark", "matches-nothing", "choice", "schema", "breaks-out", "unknown-kind"],
)
def test_a_grammar_of_no_use_fails_its_row_alone(masks: GrammarMasks, bad: common_pb2.Grammar) -> None:
    """Its masks are zeros, for every draft and for good; the neighbour is served."""
    masks.add(0, bad, [])
    masks.add(1, regex("[0-9]{2}"), [])
    lines = np.full((4, num_words(VOCAB_SIZE)), -1, np.int32)
    masks.fill([MaskAsk(0, [9, 9], 0), MaskAsk(1, [], 3)], lines)
    assert not lines[:3].any() and lines[3].any()
    masks.accept(0, [5])
    assert allowed(masks, 0) == [set()]
    assert re.fullmatch("[0-9]{2}", text_of(finish(masks, 1, random.Random(0))))


@pytest.mark.parametrize("refused", [ids_of("x"), [1], [VOCAB_SIZE - 1, 5]], ids=["text", "early-end", "other"])
def test_a_committed_token_that_the_grammar_refuses_fails_its_row(masks: GrammarMasks, refused: list[int]) -> None:
    """An end-of-sequence token where the grammar does not accept is refused like any other."""
    masks.add(0, regex("[0-9]{2}"), [])
    assert allowed(masks, 0)[0]
    masks.accept(0, refused)
    assert allowed(masks, 0, [7]) == [set(), set()]


def test_a_grammar_that_grows_too_complex_fails_its_row(masks: GrammarMasks) -> None:
    """A limit of the engine that is reached in the middle is no crash, and no mask that lets the row end as if it were complete."""
    masks.add(0, regex("((a{1,1000}b){1,1000}){1,1000}"), [])
    masks.add(1, regex("[0-9]{2}"), [])
    rng = random.Random(1)
    for _ in range(2000):
        (ids,) = allowed(masks, 0)
        if not ids:
            break
        masks.accept(0, [rng.choice(sorted(ids - set(EOS_IDS)))])
    assert allowed(masks, 0) == [set()]
    assert allowed(masks, 1)[0]


def test_an_index_is_used_again_after_removal(masks: GrammarMasks) -> None:
    """Nothing of the old row is left, nor after `clear`."""
    masks.add(0, regex("a+"), ids_of("aa"))
    allowed(masks, 0)
    masks.remove(0)
    masks.add(0, regex("[0-9]x"), [])
    assert allowed(masks, 0)[0] <= {token_id for digit in "0123456789" for token_id in ids_of(digit)} | {
        token_id for token_id in range(VOCAB_SIZE) if re.fullmatch("[0-9]x?", text_of([token_id]))
    }
    masks.clear()
    masks.add(0, regex("b"), [])
    assert allowed(masks, 0) == [set(ids_of("b"))]
