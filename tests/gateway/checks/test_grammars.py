"""Grammars at the gateway: good ones come out as the worker takes them, bad ones are refused by name."""

import json
import threading
import time
from typing import Any

import pytest

from gateway_svc.checks import grammars
from gateway_svc.checks.grammars import GrammarChecker
from protos.common.v1 import common_pb2
from svc_common.constraints import GRAMMAR_FIELDS
from svc_common.errors import InvalidArgument
from svc_common.grammars import CHOICE, JSON_SCHEMA, LARK, REGEX, GrammarCompiler
from tests.support.services.models import TINY, fallback_tokenizer

EOS_IDS = (0, 1)
VOCAB_SIZE = 4096


@pytest.fixture(scope="module")
def tokenizer_json() -> bytes:
    return (TINY / "tokenizer.json").read_bytes()


@pytest.fixture(scope="module")
def checker(tokenizer_json: bytes) -> GrammarChecker:
    return GrammarChecker(tokenizer_json, EOS_IDS, VOCAB_SIZE)


def refusal(checker: GrammarChecker, kind: common_pb2.GrammarKind, text: str) -> str:
    """`field: description` of the only violation."""
    with pytest.raises(InvalidArgument) as caught:
        checker.check(kind, text)
    (violation,) = caught.value.violations
    assert len(violation.description) < 600 and "\n" not in violation.description
    return f"{violation.field}: {violation.description}"


@pytest.mark.parametrize(
    ("kind", "text", "normalised"),
    [
        (JSON_SCHEMA, ' {"type": "object",\n "properties": {"é": {"type": "string"}}} ', None),
        (JSON_SCHEMA, "{}", "{}"),
        (JSON_SCHEMA, "true", "true"),
        (JSON_SCHEMA, '{"enum": ["日本語", "\\ud83d\\ude00", "é"]}', '{"enum":["日本語","😀","é"]}'),
        (JSON_SCHEMA, '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}', None),
        (REGEX, r" [a-z]+/\d{2} ", r" [a-z]+/\d{2} "),
        (REGEX, "日本+|[é-ü]", "日本+|[é-ü]"),
        (CHOICE, '["yes", "no",\n "yes"]', '["yes","no"]'),
        (CHOICE, '["日本", "qu\\"ote", "new\\nline"]', '["日本","qu\\"ote","new\\nline"]'),
        (LARK, 'start: "a" | b\nb: /[0-9]+/', 'start: "a" | b\nb: /[0-9]+/'),
        (LARK, 'start: %json {"type": "integer"}', 'start: %json {"type": "integer"}'),
        (LARK, 'start: "é"+', 'start: "é"+'),
    ],
)
def test_good_grammars_come_out_normalised(
    checker: GrammarChecker, kind: common_pb2.GrammarKind, text: str, normalised: str | None
) -> None:
    """JSON compact and with the order of its keys kept, everything else verbatim; and the worker can compile what comes out."""
    grammar = checker.check(kind, text)
    expected = (
        json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False) if normalised is None else normalised
    )
    assert grammar == common_pb2.Grammar(kind=kind, text=expected)
    compiler = GrammarCompiler((TINY / "tokenizer.json").read_bytes(), EOS_IDS, VOCAB_SIZE)
    assert compiler.compile(grammar).compute_bitmask()


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (JSON_SCHEMA, '{"type": "foo"}', "json_schema: is no JSON schema that can be used: Invalid type: ..."),
        (JSON_SCHEMA, '{"type":\n "object"', "is no JSON: EOF while parsing an object at line 2 column 9"),
        (JSON_SCHEMA, "[]", "must be a JSON object or true"),
        (JSON_SCHEMA, "false", "Unsatisfiable schema"),
        (
            JSON_SCHEMA,
            '{"type": "string", "minLength": 5, "maxLength": 2}',
            "minLength (5) is greater than maxLength (2)",
        ),
        (JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', 'the keywords "uniqueItems" are not supported'),
        (JSON_SCHEMA, '{"$ref": "http://example.com/a.json"}', "is no JSON schema that can be used"),
        (JSON_SCHEMA, '{"$ref": "#/$defs/none"}', "Pointer '...' does not exist"),
        (JSON_SCHEMA, '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
        (JSON_SCHEMA, '{"maximum": NaN}', "is no JSON: expected value at line 1 column 13"),
        (JSON_SCHEMA, '{"maximum": 1e999}', "out of range"),
        (JSON_SCHEMA, '{"maximum": ' + "9" * 5000 + "}", "is no JSON: number out of range"),
        (JSON_SCHEMA, '{"const": "\\ud800"}', "is no JSON: unexpected end of hex escape at line 1 column 18"),
        (JSON_SCHEMA, '{"items":' * 300 + "{}" + "}" * 300, "recursion limit exceeded"),
        (JSON_SCHEMA, "[" * 100_000, "recursion limit exceeded"),
        (JSON_SCHEMA, '{"const": 1} }, {"lark_grammar": "start: /x/"}', "is no JSON: trailing characters"),
        (JSON_SCHEMA, '{"x-guidance": {"nonsense": 1}}', "unknown field `...`"),
        (JSON_SCHEMA, "", "is empty"),
        (REGEX, "[a-", "regex: is no regular expression that can be used: unclosed character class"),
        (REGEX, r"(a)\1", "backreferences are not supported"),
        (REGEX, "a(?!b)", "look-around"),
        (REGEX, "", "is empty"),
        (REGEX, r"[^\x00-\x{10FFFF}]", "matches nothing"),
        (REGEX, "(a|b|ab|ba)*" * 500, "too complex"),
        (CHOICE, "[]", "choice: has 0 strings"),
        (CHOICE, '["a", 1]', "must be a list of strings"),
        (CHOICE, '{"a": 1}', "must be a list of strings"),
        (CHOICE, '["a", ""]', "has an empty string"),
        (CHOICE, json.dumps([f"{i}" for i in range(10_001)]), "has 10001 strings; give 1 to 10000"),
        (
            LARK,
            "start: nothing",
            'lark: is no Lark grammar that can be used: line 1, column 8: unknown name: "..."',
        ),
        (LARK, 'start: "a', "line 1, column 10"),
        (LARK, 'a: "b"', "no start rule found"),
        (LARK, "start: start", "matches nothing"),
        (LARK, "start: /[a-/", "unclosed character class"),
        (LARK, '{"grammars": [{"json_schema": {}}]}', "line 1, column 1"),
        (LARK, " \n", "is empty"),
    ],
)
def test_bad_grammars_are_refused_by_name(
    checker: GrammarChecker, kind: common_pb2.GrammarKind, text: str, said: str
) -> None:
    """One violation with the field's path and one line that says what is wrong; the same the second time."""
    first = refusal(checker, kind, text)
    assert first.startswith(f"structured_output.{GRAMMAR_FIELDS[kind]}: ") and said in first
    assert refusal(checker, kind, text) == first


def longest_chain(level: str, kind: common_pb2.GrammarKind) -> tuple[str, int]:
    """As many definitions as a grammar may have, each (ME) referring to the next (NEXT), and the number of the missing last."""
    count = grammars.MAX_GRAMMAR_BYTES[kind] // (len(level) + 4) - 20
    return "".join(level.replace("ME", f"{i:04}").replace("NEXT", f"{i + 1:04}") for i in range(count)), count


@pytest.mark.parametrize(
    ("level", "is_accepted"),
    [
        ('"ME":{"patternProperties":{"^a":{"$ref":"#/NEXT"}}},', True),
        ('"ME":{"items":{"$ref":"#/NEXT"}},', False),
        ('"ME":{"anyOf":[{"$ref":"#/NEXT"}]},', False),
        ('"ME":{"$ref":"#/NEXT"},', False),
    ],
)
def test_the_longest_chain_of_schemas_is_survived(checker: GrammarChecker, level: str, is_accepted: bool) -> None:
    """The engine recurses along it; on a usual stack the process would end."""
    definitions, last = longest_chain(level, JSON_SCHEMA)
    text = f'{{{definitions}"{last:04}":{{}},"$ref":"#/0000"}}'
    if is_accepted:
        assert checker.check(JSON_SCHEMA, text).text
    else:
        assert any(why in refusal(checker, JSON_SCHEMA, text) for why in ("too complex", "more than 100 levels"))


@pytest.mark.parametrize("rule", ["rME:rNEXT\n", "RME:RNEXT\n"])
def test_the_longest_chain_of_rules_is_survived(checker: GrammarChecker, rule: str) -> None:
    """Of rules and of terminals."""
    rules, last = longest_chain(rule, LARK)
    assert checker.check(LARK, f'start: {rule[0]}0000\n{rules}{rule[0]}{last:04}:"x"\n').text


@pytest.mark.parametrize("kind", [JSON_SCHEMA, REGEX, CHOICE, LARK])
def test_oversize_grammars_are_refused_unread(checker: GrammarChecker, kind: common_pb2.GrammarKind) -> None:
    """Counted in bytes of UTF-8; both numbers are said."""
    limit = grammars.MAX_GRAMMAR_BYTES[kind]
    assert refusal(checker, kind, "é" * (limit // 2 + 1)).endswith(
        f"has {limit + 2} bytes; at most {limit} are allowed"
    )


def test_surrogates_in_any_text_are_refused(checker: GrammarChecker) -> None:
    """They cannot be said in UTF-8."""
    assert "lone surrogate" in refusal(checker, REGEX, "a\ud800")


def test_an_unknown_kind(checker: GrammarChecker) -> None:
    """UNSPECIFIED, and numbers of a later release."""
    for kind in (common_pb2.GRAMMAR_KIND_UNSPECIFIED, 77):
        assert refusal(checker, kind, "a").startswith("structured_output: ")  # type: ignore[arg-type]


def test_the_field_can_be_named_otherwise(checker: GrammarChecker) -> None:
    """The OpenAI door has other names for it."""
    with pytest.raises(InvalidArgument) as caught:
        checker.check(REGEX, "[", field="extra_body.structured_outputs")
    assert caught.value.violations[0].field == "extra_body.structured_outputs.regex"


def test_the_worst_grammars_within_the_limits_end_in_time(checker: GrammarChecker) -> None:
    """A text of the largest size that is as bad as it gets is answered in seconds, and meanwhile other threads run."""
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.01):
            ticks.append(time.monotonic())

    ticker = threading.Thread(target=tick)
    ticker.start()
    begin = time.process_time()
    try:
        repeated = "(a|b|ab|ba)*" * (grammars.MAX_GRAMMAR_BYTES[REGEX] // 12)
        assert "too complex" in refusal(checker, REGEX, repeated)
    finally:
        done.set()
        ticker.join()
    # Far from what it takes (0.2 s), near enough to notice that a limit is gone (more than a minute).
    assert time.process_time() - begin < 20
    assert len(ticks) >= 2


def test_verdicts_are_remembered_and_forgotten(tokenizer_json: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar is compiled once, a refused one too, until as many others as are kept came after it."""
    compiled: list[str] = []
    compile_one: Any = GrammarCompiler.compile

    def counting(self: GrammarCompiler, grammar: common_pb2.Grammar) -> Any:
        compiled.append(grammar.text)
        return compile_one(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "compile", counting)
    monkeypatch.setattr(grammars, "MAX_REMEMBERED", 3)
    checker = GrammarChecker(tokenizer_json, EOS_IDS, VOCAB_SIZE)
    for _ in range(3):
        checker.check(REGEX, "a")
        refusal(checker, REGEX, "[")
    assert compiled == ["a", "["]
    for text in ("b", "c"):
        checker.check(REGEX, text)
    checker.check(REGEX, "a")
    assert compiled == ["a", "[", "b", "c", "a"]


def test_the_same_text_of_another_kind_is_another_grammar(checker: GrammarChecker) -> None:
    """`"a"` is a regular expression, but neither a choice nor a schema."""
    checker.check(REGEX, '"a"')
    refusal(checker, CHOICE, '"a"')
    refusal(checker, JSON_SCHEMA, '"a"')


def test_a_tokenizer_with_byte_fallback(tokenizer_json: bytes) -> None:
    """SentencePiece style vocabularies work too."""
    tokenizer = fallback_tokenizer()
    checker = GrammarChecker(tokenizer.to_str().encode(), [0], tokenizer.get_vocab_size())
    assert checker.check(CHOICE, '["日本","Hello world"]')


@pytest.mark.parametrize(
    ("tokenizer_json", "eos_ids", "said"),
    [(b"{}", [0], "tokenizer"), (b"\xff", [0], "tokenizer"), (None, [], "end-of-sequence")],
)
def test_models_that_cannot_have_it(tokenizer_json: bytes | None, eos_ids: list[int], said: str) -> None:
    """The checker can be made for any model; a request that asks is refused with the reason."""
    data = (TINY / "tokenizer.json").read_bytes() if tokenizer_json is None else tokenizer_json
    assert said in refusal(GrammarChecker(data, eos_ids, VOCAB_SIZE), REGEX, "a")
