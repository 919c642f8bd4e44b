"""SamplingParams: what is checked, and what reaches the wire."""

import math

import numpy as np
import pytest

import quire
from quire import SamplingParams
from quire.client import messages
from quire.client.messages import RequestOptions
from svc_common.errors import InvalidArgument


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("best_of", 0),
        ("best_of", 129),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("presence_penalty", 2.1),
        ("presence_penalty", None),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("logit_bias", {5: 101}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", [1]),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", 3),
        ("bad_words", "one"),
        ("bad_words", [""]),
        ("bad_words", ["x"] * 65),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", True),
        ("structured_outputs", {"regex": "a"}),
        ("use_beam_search", 1),
        ("length_penalty", 11),
        ("early_stopping", "soon"),
        ("temperature", -0.1),
        ("temperature", 10.5),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("stop_token_ids", [-1]),
        ("logprobs", 21),
        ("n", []),
        ("temperature", "a"),
        ("temperature", True),
        ("top_p", "0.5"),
        ("top_k", 1.5),
        ("seed", "7"),
        ("max_tokens", 1.5),
        ("max_tokens", 2**32),
        ("min_tokens", None),
        ("stop", 5),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stop_token_ids", 5),
        ("stop_token_ids", [1.5]),
        ("ignore_eos", "no"),
        ("logprobs", "all"),
    ],
)
def test_wrong_fields_are_named(field: str, value: object) -> None:
    """InvalidArgument with a violation for the field."""
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(**{field: value})
    assert [v.field for v in caught.value.violations] == [field]


def test_kinds_that_are_as_good() -> None:
    """vLLM's None for no stops, and numpy's numbers and arrays."""
    params = SamplingParams(
        max_tokens=np.int64(3), temperature=np.float32(0.5), stop=None, stop_token_ids=np.array([7])
    )
    request = messages.generate_request(np.array([1, 2]), params, RequestOptions())
    assert (request.stop.max_tokens, list(request.stop.stop_token_ids)) == (3, [7])
    assert list(request.token_ids.ids) == [1, 2]
    assert SamplingParams(stop_token_ids=None).stop_strings == []


def test_all_wrong_fields_at_once() -> None:
    """One error names all of them."""
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(temperature=-1, top_p=2, max_tokens=0)
    assert [v.field for v in caught.value.violations] == ["temperature", "top_p", "max_tokens"]


def test_what_is_given_reaches_the_wire_and_nothing_else() -> None:
    """Absent stays absent, so that the server's default applies; zero is not absent."""
    given = SamplingParams(temperature=0, top_p=0.5, top_k=-1, seed=0, max_tokens=3, min_tokens=1, stop="x", logprobs=0)
    request = messages.generate_request([1, 2], given, RequestOptions(priority=-3))
    assert list(request.token_ids.ids) == [1, 2]
    assert request.sampling.HasField("temperature") and request.sampling.HasField("seed")
    assert (request.sampling.top_k, request.sampling.top_p) == (0, 0.5)
    assert (request.stop.max_tokens, request.stop.min_tokens, list(request.stop.stop_strings)) == (3, 1, ["x"])
    assert request.response.logprobs
    assert request.scheduling.priority == -3
    open_ended = SamplingParams(temperature=None, top_p=None, top_k=None, max_tokens=None)
    request = messages.generate_request("text", open_ended, RequestOptions())
    assert not any(request.sampling.HasField(name) for name in ("temperature", "top_p", "top_k", "seed"))
    assert not request.stop.HasField("max_tokens")
    assert not request.response.logprobs


@pytest.mark.parametrize("prompt", ["caf\udce9", [-1], [2**32], [1.5], [True], None, 5, b"ab", {"prompt": "x"}])
def test_prompts_that_cannot_travel(prompt: object) -> None:
    """A lone surrogate, numbers that are no ids, and what is no prompt at all are refused here, by field."""
    with pytest.raises(InvalidArgument) as caught:
        messages.generate_request(prompt, None, RequestOptions())  # type: ignore[arg-type]
    assert caught.value.violations[0].field == "prompt"


@pytest.mark.parametrize(
    ("params", "options", "field"),
    [
        ({}, RequestOptions(), "sampling_params"),
        (None, RequestOptions(priority="high"), "priority"),  # type: ignore[arg-type]
        (None, RequestOptions(priority=2**31), "priority"),
    ],
)
def test_other_wrong_arguments(params: object, options: RequestOptions, field: str) -> None:
    """Typed as well, not whatever protobuf says."""
    with pytest.raises(InvalidArgument) as caught:
        messages.generate_request("x", params, options)  # type: ignore[arg-type]
    assert caught.value.violations[0].field == field


@pytest.mark.parametrize("conversation", [None, 5, ["hi"], [{"role": "user"}], [{"role": 1, "content": "x"}]])
def test_conversations_that_are_none(conversation: object) -> None:
    """Named by the turn."""
    with pytest.raises(InvalidArgument) as caught:
        messages.chat_request(conversation, None, RequestOptions())  # type: ignore[arg-type]
    assert caught.value.violations[0].field.startswith("messages")


def test_every_public_name_can_be_had() -> None:
    """`quire.__all__` is the public API; an unknown name is an AttributeError."""
    assert {getattr(quire, name) is not None for name in quire.__all__} == {True}
    with pytest.raises(AttributeError):
        _ = quire.Engine
