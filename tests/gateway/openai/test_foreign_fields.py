"""Fields of SGLang, llama.cpp and TGI: those that change the output do here what they do there, or are refused by name."""

import json
from typing import Any

import pytest

from gateway_svc.http.errors import error_body
from gateway_svc.openai.requests.chat_request import ChatCompletionRequest
from gateway_svc.openai.requests.completion_request import CompletionRequest, foreign_fields, parse_request
from protos.inference.v1 import inference_pb2 as pb
from svc_common.errors import InvalidArgument

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
# What each project's documentation lists, that changes what is generated; `...`: any value.
DOCUMENTED = {
    "SGLang": {
        "regex": "[0-9]+",
        "ebnf": 'root ::= "a"',
        "json_schema": json.dumps(SCHEMA),
        "structural_tag": "{}",
        "min_new_tokens": 3,
        "max_new_tokens": 5,
        "stop_regex": "a+",
        "no_stop_trim": True,
        "lora_path": "sql",
        "custom_logit_processor": "x",
        "session_params": {"id": "1"},
        "return_hidden_states": True,
    },
    "llama.cpp": {
        "n_predict": 5,
        "json_schema": SCHEMA,
        "grammar": 'root ::= "a"',
        "dynatemp_range": 0.5,
        "typical_p": 0.9,
        "repeat_penalty": 1.1,
        "dry_multiplier": 0.8,
        "dry_base": 2.0,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 64,
        "dry_sequence_breakers": ["x"],
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "mirostat": 2,
        "mirostat_tau": 4.0,
        "mirostat_eta": 0.2,
        "top_n_sigma": 1.0,
        "samplers": ["top_k"],
        "n_probs": 3,
        "lora": [{"id": 0, "scale": 1.0}],
        "t_max_predict_ms": 100,
    },
    "TGI": {
        "max_new_tokens": 5,
        "grammar": {"type": "json", "value": SCHEMA},
        "typical_p": 0.9,
        "do_sample": False,
        "return_full_text": True,
        "truncate": 7,
        "watermark": True,
        "top_n_tokens": 3,
        "decoder_input_details": True,
        "adapter_id": "sql",
    },
}
MAPPED = {"regex", "json_schema", "min_new_tokens", "max_new_tokens", "n_predict", "no_stop_trim", "truncate"}
EACH = [(project, name, value) for project, fields in DOCUMENTED.items() for name, value in fields.items()]


def completion(**fields: Any) -> pb.GenerateRequest:
    _, (message,) = parse_request(CompletionRequest, json.dumps({"prompt": "x", **fields}).encode())
    assert isinstance(message, pb.GenerateRequest)
    return message


@pytest.mark.parametrize(("project", "name", "value"), EACH)
def test_what_changes_the_output_is_never_ignored(project: str, name: str, value: Any) -> None:
    """The message differs from one without the field, or the field is refused with what to send instead."""
    if name in MAPPED or (project, name) == ("TGI", "grammar"):
        assert completion(**{name: value}) != completion()
        return
    with pytest.raises(InvalidArgument) as caught:
        completion(**{name: value})
    error = error_body(caught.value)["error"]
    assert error["param"] == name and error["code"] == "unsupported_field"
    assert ("; " in error["message"]) and len(error["message"].partition("; ")[2]) > 10


@pytest.mark.parametrize(("name", "values"), foreign_fields.NEUTRAL.items())
def test_values_that_change_nothing_are_accepted(name: str, values: tuple[Any, ...]) -> None:
    """Clients of these projects send all of their fields, most of them at their defaults."""
    for value in (None, *values):
        assert completion(**{name: value}) == completion()


def test_fields_that_mean_the_same() -> None:
    """As ours do; in chats too; -1 is no bound for llama.cpp."""
    assert completion(n_predict=5) == completion(max_new_tokens=5) == completion(max_tokens=5)
    assert completion(n_predict=-1) == completion()
    assert completion(min_new_tokens=3, max_tokens=9) == completion(min_tokens=3, max_tokens=9)
    assert completion(no_stop_trim=True) == completion(include_stop_str_in_output=True)
    assert completion(truncate=7) == completion(truncate_prompt_tokens=7)
    assert completion(regex="[0-9]+") == completion(guided_regex="[0-9]+")
    for schema in (SCHEMA, json.dumps(SCHEMA, separators=(",", ":"))):
        assert completion(json_schema=schema) == completion(guided_json=SCHEMA)
    assert completion(grammar={"type": "json", "value": SCHEMA}) == completion(guided_json=SCHEMA)
    assert completion(grammar={"type": "regex", "value": "a"}) == completion(guided_regex="a")
    body = {"messages": [{"role": "user", "content": "x"}], "n_predict": 5}
    _, (message,) = parse_request(ChatCompletionRequest, json.dumps(body).encode())
    assert message.stop.max_tokens == 5


def test_two_that_mean_the_same_must_agree() -> None:
    """Refused where they differ, as no order between them is known."""
    assert completion(n_predict=5, max_tokens=5).stop.max_tokens == 5
    with pytest.raises(InvalidArgument, match="n_predict: and max_tokens mean the same"):
        completion(n_predict=5, max_tokens=6)
