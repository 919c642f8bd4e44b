"""Requests whose own constraints leave no token, or whose grammars cost too much: the caller's errors, at both doors."""

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from quire import SamplingParams, StructuredOutputsParams
from quire.client.sync_client import Client
from quire.local_stack.stack import LocalStack
from svc_common.errors import InvalidArgument
from tests.support.scraping import scrape
from tests.support.stack.sizes import MASK_BUDGET_MS
from tests.support.stack.supervised import Supervised

AMBIGUOUS = 'start: e\ne: e e | "a" | "b" | "" | e "c" e\n'
WIDE = {
    "allOf": [{"type": "object", "properties": {f"p{i}_{j}": {"type": "string"} for j in range(20)}} for i in range(60)]
}
CONJOINED = {"type": "string", "allOf": [{"pattern": "|".join(f"v{i}_{j}" for j in range(20))} for i in range(60)]}

Case = tuple[dict[str, Any], set[str], list[str]]
# Fields of a completion over HTTP; reasons that the error may have; words that its message must have.
CASES: dict[str, Case] = {
    "regex and allowed_token_ids": (
        {"guided_regex": "[0-9]+", "allowed_token_ids": [300, 301]},
        {"NO_TOKEN_LEFT"},
        ["regex", "allowed_token_ids"],
    ),
    "min_tokens and three stop tokens": (
        {"min_tokens": 5, "allowed_token_ids": [310, 311, 312], "stop_token_ids": [310, 311, 312]},
        {"NO_TOKEN_LEFT"},
        ["min_tokens", "allowed_token_ids"],
    ),
    "min_tokens and the ends of the model": (
        {"min_tokens": 5, "allowed_token_ids": [0, 1]},
        {"NO_TOKEN_LEFT"},
        ["min_tokens", "allowed_token_ids"],
    ),
    "choice and bad_words": ({"guided_choice": ["a"], "bad_words": ["a"]}, {"NO_TOKEN_LEFT"}, ["choice", "bad_words"]),
    "choice and min_tokens": ({"guided_choice": ["a"], "min_tokens": 5}, {"NO_TOKEN_LEFT"}, ["choice", "min_tokens"]),
    "a long repetition in Lark": ({"guided_grammar": 'start: "a"~1000000\n'}, {"INVALID_FIELD"}, ["grammar", "too complex"]),
    "a long repetition in a terminal": (
        {"guided_grammar": "start: A\nA: /a{1000000}/\n"},
        {"INVALID_FIELD"},
        ["grammar", "too complex"],
    ),
    "1,200 optional properties": ({"guided_json": WIDE}, {"INVALID_FIELD", "GRAMMAR_LIMIT"}, ["json_schema"]),
    "60 patterns of one string": ({"guided_json": CONJOINED}, {"INVALID_FIELD"}, ["json_schema", "pattern"]),
}  # fmt: skip
_GUIDED = {"guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar", "guided_json": "json"}


def over_http(stack: LocalStack, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and body of a completion."""
    body = json.dumps({"model": "tiny", "prompt": "It is ", "max_tokens": 30, "temperature": 0, **fields}).encode()
    request = urllib.request.Request(f"{stack.http_url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def params(fields: dict[str, Any]) -> SamplingParams:
    """The same for `Client`."""
    guided = {ours: fields[name] for name, ours in _GUIDED.items() if name in fields}
    others = {name: value for name, value in fields.items() if name not in _GUIDED}
    structured = StructuredOutputsParams(**guided) if guided else None
    return SamplingParams(max_tokens=30, temperature=0.0, structured_outputs=structured, **others)


@pytest.mark.parametrize("name", CASES)
def test_closed_by_the_callers_own_constraints(stack: LocalStack, client: Client, name: str) -> None:
    """400 and INVALID_ARGUMENT with a reason, naming the constraints; the neighbour's tokens are those it has alone."""
    fields, reasons, words = CASES[name]
    plain = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    alone = client.generate("The quick brown fox", plain).outputs[0].token_ids
    neighbour = client.generate_stream("The quick brown fox", plain)
    deltas = iter(neighbour)
    next(deltas)
    status, body = over_http(stack, fields)
    with pytest.raises(InvalidArgument) as caught:
        client.generate("It is ", params(fields))
    for _ in deltas:
        pass
    assert neighbour.result.outputs[0].token_ids == alone
    assert status == 400, body
    assert body["error"]["code"].upper() in reasons and caught.value.reason in reasons
    for word in words:
        assert word in caught.value.message, caught.value.message


def test_a_costly_grammar_is_paid_by_its_sender(killable: Supervised, record_property: Any) -> None:
    """Eight samples of an ambiguous grammar end with MASK_BUDGET; the plain stream beside them has its own tokens, and the worker
    counted what masks took."""
    plain = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
    ambiguous = StructuredOutputsParams(grammar=AMBIGUOUS)
    attack = SamplingParams(max_tokens=240, min_tokens=240, temperature=1.0, seed=1, n=8, structured_outputs=ambiguous)
    with Client(killable.stack.grpc_address) as client:
        alone = client.generate("Once upon a time", plain).outputs[0].token_ids
        attacked = client.generate_stream("Once upon a time", attack)
        deltas = iter(attacked)
        next(deltas)
        assert client.generate("Once upon a time", plain).outputs[0].token_ids == alone
        with pytest.raises(InvalidArgument) as caught:
            for _ in deltas:
                pass
        masks = asyncio.run(scrape(killable.stack.metrics_addresses["worker"]))
    assert caught.value.reason == "MASK_BUDGET"
    assert f"{MASK_BUDGET_MS} ms" in caught.value.message and "--mask-budget-ms" in caught.value.message
    assert [violation.field for violation in caught.value.violations] == ["structured_output.lark"]
    assert masks.value("quire_worker_mask_seconds_count") > 0
    record_property("size", f"masks of the attack: {masks.value('quire_worker_mask_seconds_sum'):.3f} s of CPU time")
