"""What can be known of a request's constraints before it runs: first tokens, and patterns of one string."""

import numpy as np
import pytest

from gateway_svc.checks.first_token import check_first_token
from gateway_svc.checks.schema_patterns import most_conjoined
from protos.common.v1 import common_pb2
from svc_common import wire_arrays
from svc_common.errors import InvalidArgument

LIMITS = common_pb2.ModelLimits(vocab_size=8, eos_token_ids=[0])


class _Begins:
    """A model whose grammars begin with these tokens."""

    def __init__(self, *token_ids: int) -> None:
        self._opens = np.isin(np.arange(LIMITS.vocab_size), token_ids)

    def first_tokens(self, grammar: common_pb2.Grammar) -> np.ndarray:
        return self._opens


def _sampling(allowed: list[int], words: list[list[int]], *, has_grammar: bool) -> common_pb2.ResolvedSampling:
    kind = common_pb2.GRAMMAR_KIND_REGEX if has_grammar else common_pb2.GRAMMAR_KIND_UNSPECIFIED
    return common_pb2.ResolvedSampling(
        allowed_token_ids=wire_arrays.pack(allowed),
        bad_words=[common_pb2.TokenSequence(token_ids=wire_arrays.pack(word)) for word in words],
        grammar=common_pb2.Grammar(kind=kind, text="x" if has_grammar else ""),
    )


@pytest.mark.parametrize(
    ("allowed", "words", "min_tokens", "begins", "fields"),
    [
        ([1, 2], [], 0, (3, 4), ["structured_output.regex", "sampling.allowed_token_ids"]),
        ([0, 5], [], 1, None, ["sampling.allowed_token_ids", "stop.min_tokens"]),
        ([1, 2], [[1], [2]], 0, None, ["sampling.allowed_token_ids", "sampling.bad_words"]),
        ([], [[3]], 1, (0, 3, 5), ["structured_output.regex", "sampling.bad_words", "stop.min_tokens"]),
        ([1, 2], [[1], [2, 3]], 1, None, []),
        ([1, 2], [], 0, (2, 3), []),
        ([0], [], 0, (0,), []),
        ([], [[1], [2]], 1, None, []),
        ([], [], 1, (1,), []),
    ],
)
def test_first_tokens(
    allowed: list[int], words: list[list[int]], min_tokens: int, begins: tuple[int, ...] | None, fields: list[str]
) -> None:
    """Refused with all constraints named where nothing is left, 5 being a stop token; else accepted."""
    sampling = _sampling(allowed, words, has_grammar=begins is not None)
    stop = common_pb2.StopRules(max_tokens=9, min_tokens=min_tokens, stop_token_ids=[5])
    model = _Begins(*(begins or ()))
    if not fields:
        check_first_token(sampling, stop, LIMITS, model)
        return
    with pytest.raises(InvalidArgument) as caught:
        check_first_token(sampling, stop, LIMITS, model)
    assert caught.value.reason == "NO_TOKEN_LEFT"
    assert [violation.field for violation in caught.value.violations] == fields


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (True, 0),
        ({"pattern": "a", "format": "date"}, 2),
        ({"allOf": [{"pattern": "a"}] * 60}, 60),
        ({"allOf": [{"allOf": [{"pattern": "a"}] * 2}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"pattern": "b"}}}, 3),
        ({"anyOf": [{"pattern": "a"}] * 60}, 1),
        ({"allOf": [{"properties": {"a": {"pattern": "x"}}}, {"properties": {"a": {"pattern": "x"}, "b": {"format": "y"}}}]}, 2),
        ({"items": {"items": {"allOf": [{"pattern": "a"}, {"anyOf": [{"pattern": "b"}, {}]}]}}}, 2),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a", "pattern": "x"}}}, 1),
        ({"$ref": "#"}, 0),
        ({"properties": {"next": {"$ref": "#"}, "id": {"pattern": "x"}}}, 1),
        ({"allOf": 7, "properties": [], "$ref": 3, "anyOf": {}}, 0),
    ],
)  # fmt: skip
def test_patterns_of_one_string(schema: object, expected: int) -> None:
    """Those that one value must match; references end, also where they name themselves."""
    assert most_conjoined(schema) == expected
