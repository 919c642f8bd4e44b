"""What requests may ask for: each wrong field named, every default in one place."""

import contextlib
import math

import pytest

from gateway_svc.checks import validation
from gateway_svc.checks.validation import SamplingDefaults
from gateway_svc.request_ids import accept_request_id, new_request_id
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb
from svc_common import wire_arrays
from svc_common.errors import InvalidArgument, OutOfRange
from tests.support.services.models import tiny

LIMITS = common_pb2.ModelLimits(model="tiny", max_model_len=100, vocab_size=50, block_size=16)
MANY = common_pb2.ModelLimits(model="tiny", max_model_len=100, vocab_size=2000, block_size=16)
DEFAULTS = SamplingDefaults(temperature=0.7, top_p=0.9, top_k=20)


def generate(**parts: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hello", **parts)


def beam(**fields: float) -> pb.SamplingParams:
    return pb.SamplingParams(beam=pb.BeamSearch(), **fields)


WRONG = {
    "sampling.temperature": [
        generate(sampling=pb.SamplingParams(temperature=value)) for value in (-0.1, 10.5, math.nan, math.inf)
    ],
    "sampling.top_p": [generate(sampling=pb.SamplingParams(top_p=value)) for value in (0, -1, 1.01, math.nan)],
    "sampling.n": [generate(sampling=pb.SamplingParams(n=value)) for value in (0, 129)],
    "sampling.best_of": [generate(sampling=pb.SamplingParams(n=2, best_of=value)) for value in (0, 1, 129)],
    "sampling.min_p": [generate(sampling=pb.SamplingParams(min_p=value)) for value in (-0.1, 1.1, math.nan)],
    "sampling.presence_penalty": [generate(sampling=pb.SamplingParams(presence_penalty=v)) for v in (-2.1, math.nan)],
    "sampling.frequency_penalty": [generate(sampling=pb.SamplingParams(frequency_penalty=v)) for v in (2.1, math.inf)],
    "sampling.repetition_penalty": [
        generate(sampling=pb.SamplingParams(repetition_penalty=value)) for value in (0, -1, 10.5, math.nan)
    ],
    "sampling.logit_bias": [generate(sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(1025), 1)))],
    "sampling.logit_bias[7]": [
        generate(sampling=pb.SamplingParams(logit_bias={3: 1, 7: value})) for value in (-100.5, math.nan)
    ],
    "sampling.logit_bias[50]": [generate(sampling=pb.SamplingParams(logit_bias={50: 1}))],
    "sampling.allowed_token_ids[1]": [generate(sampling=pb.SamplingParams(allowed_token_ids=[3, 50]))],
    "sampling.bad_words[1]": [
        generate(sampling=pb.SamplingParams(bad_words=["x", bad])) for bad in ("", " ", "y" * 257)
    ],
    "sampling.bad_words": [generate(sampling=pb.SamplingParams(bad_words=["x"] * 65))],
    "sampling.temperature of a beam": [generate(sampling=beam(temperature=0.5))],
    "sampling.top_p of a beam": [generate(sampling=beam(top_p=0.5))],
    "sampling.top_k of a beam": [generate(sampling=beam(top_k=5))],
    "sampling.min_p of a beam": [generate(sampling=beam(min_p=0.5))],
    "sampling.beam.length_penalty": [
        generate(sampling=pb.SamplingParams(beam=pb.BeamSearch(length_penalty=value))) for value in (10.5, math.nan)
    ],
    "sampling.beam.early_stopping": [generate(sampling=pb.SamplingParams(beam=pb.BeamSearch(early_stopping=9)))],
    "response.num_top_logprobs": [generate(response=pb.ResponseOptions(num_top_logprobs=21))],
    "response.num_prompt_logprobs": [generate(response=pb.ResponseOptions(num_prompt_logprobs=21))],
    "stop.max_tokens": [generate(stop=pb.StopConditions(max_tokens=0))],
    "stop.min_tokens": [
        generate(stop=pb.StopConditions(max_tokens=3, min_tokens=4)),
        generate(stop=pb.StopConditions(min_tokens=100)),
    ],
    "stop.stop_strings": [
        generate(stop=pb.StopConditions(stop_strings=["x"] * 17)),
        generate(stop=pb.StopConditions(stop_strings=["x"]), sampling=pb.SamplingParams(best_of=2)),
        generate(stop=pb.StopConditions(stop_strings=["x"]), sampling=beam()),
    ],
    "stop.stop_strings[1]": [generate(stop=pb.StopConditions(stop_strings=["x", bad])) for bad in ("", "y" * 257)],
    "stop.stop_token_ids[0]": [generate(stop=pb.StopConditions(stop_token_ids=[50]))],
    "stop.stop_token_ids": [generate(stop=pb.StopConditions(stop_token_ids=[1] * 257))],
    "stop.ignore_eos": [
        generate(stop=pb.StopConditions(ignore_eos=True), **grammar)
        for grammar in ({"json_schema": "{}"}, {"regex": "a"}, {"choice": pb.ChoiceList(choices=["a"])}, {"lark": "x"})
    ],
    "scheduling.priority": [generate(scheduling=pb.Scheduling(priority=-(2**31)))],
    "cache.cache_salt": [generate(cache=pb.CacheOptions(cache_salt="s" * 257))],
    "labels": [generate(labels={str(i): "" for i in range(17)}), generate(labels={"k": "v" * 65})],
    "prompt": [pb.GenerateRequest()],
    "text": [pb.GenerateRequest(text="")],
    "token_ids.ids": [pb.GenerateRequest(token_ids=pb.TokenIds())],
    "token_ids.ids[2]": [pb.GenerateRequest(token_ids=pb.TokenIds(ids=[0, 49, 50, 99]))],
    "messages": [pb.ChatRequest()],
    "messages[0].role": [pb.ChatRequest(messages=[pb.Message(content="x")])],
}


@pytest.mark.parametrize(("field", "request_"), [(field, r) for field, rs in WRONG.items() for r in rs])
def test_a_wrong_field_is_named(field: str, request_: validation.AnyRequest) -> None:
    """INVALID_ARGUMENT with exactly this field violation."""
    field = field.removesuffix(" of a beam")
    with pytest.raises(InvalidArgument) as caught:
        validation.check_parameters(request_, MANY if field == "sampling.logit_bias" else LIMITS)
    assert [violation.field for violation in caught.value.violations] == [field]
    assert field in caught.value.message


def test_all_wrong_fields_are_reported_at_once() -> None:
    """A client fixes them in one go."""
    bad = generate(sampling=pb.SamplingParams(temperature=-1, top_p=2), stop=pb.StopConditions(max_tokens=0))
    with pytest.raises(InvalidArgument) as caught:
        validation.check_parameters(bad, LIMITS)
    assert {v.field for v in caught.value.violations} == {"sampling.temperature", "sampling.top_p", "stop.max_tokens"}


def test_absent_fields_take_the_models_defaults() -> None:
    """And max_tokens goes up to the context, never a hidden 16."""
    resolved = validation.resolve(generate(), [1, 2, 3], LIMITS, DEFAULTS, tiny(), draw_seed=lambda: 42)
    sampling, stop = resolved.sampling, resolved.stop
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (pytest.approx(0.7), pytest.approx(0.9), 20)
    assert (sampling.seed, sampling.logprobs) == (42, False)
    assert (stop.max_tokens, stop.min_tokens, stop.ignore_eos) == (97, 0, False)


def test_zero_is_a_value_and_not_absence() -> None:
    """Greedy, all tokens, seed 0: proto3 zeros that were set must win over defaults."""
    asked = generate(sampling=pb.SamplingParams(temperature=0, top_k=0, seed=0))
    sampling = validation.resolve(asked, [1], LIMITS, DEFAULTS, tiny(), draw_seed=lambda: 42).sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0, 0, 0)


def test_neutral_values_beside_beams_are_accepted() -> None:
    """What clients send by default changes nothing: it is no contradiction."""
    for fields in ({"temperature": 0}, {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "seed": 5}):
        validation.check_parameters(generate(sampling=beam(**fields)), LIMITS)
    resolved = validation.resolve(generate(sampling=beam()), [1], LIMITS, DEFAULTS, tiny())
    sampling = resolved.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 1, 0, 0)


def test_log_probabilities_of_a_prompt_have_a_limit() -> None:
    """They travel in one message: a long prompt takes fewer neighbours, and says so."""
    long = common_pb2.ModelLimits(model="tiny", max_model_len=200_000, vocab_size=50, block_size=16)
    for num_tokens, num_top, good in ((50_000, 3, True), (50_001, 3, False), (150_000, 0, True), (150_000, 1, False)):
        asked = generate(response=pb.ResponseOptions(num_prompt_logprobs=num_top))
        with contextlib.nullcontext() if good else pytest.raises(InvalidArgument, match="num_prompt_logprobs"):
            validation.resolve(asked, [1] * num_tokens, long, DEFAULTS, tiny())


def test_bad_words_as_they_appear_in_text() -> None:
    """Every tokenisation with and without the space before them, once each."""
    words = [" hello", "hello", "nice day"]
    asked = generate(sampling=pb.SamplingParams(bad_words=words))
    found = validation.resolve(asked, [1], LIMITS, DEFAULTS, tiny()).sampling.bad_words
    assert [wire_arrays.unpack(word.token_ids, "x").tolist() for word in found] == [
        tiny().encode(text) for text in ("hello", " hello", "nice day", " nice day")
    ]


def test_a_bad_grammar_is_named() -> None:
    """Found out before the request is accepted, whatever its kind."""
    for fields in (
        {"json_schema": '{"type": "nope"}'},
        {"json_schema": "{"},
        {"regex": "("},
        {"choice": pb.ChoiceList()},
        {"lark": "start: nothing"},
    ):
        (name,) = fields
        with pytest.raises(InvalidArgument) as caught:
            validation.resolve(generate(**fields), [1], LIMITS, DEFAULTS, tiny())
        assert [violation.field for violation in caught.value.violations] == [f"structured_output.{name}"]


def test_ignore_eos_beside_a_grammar_says_which() -> None:
    """The end of a match could not be seen: both fields are named. `ignore_eos` false beside it says nothing."""
    with pytest.raises(InvalidArgument, match=r"stop\.ignore_eos: is true beside structured_output\.regex"):
        validation.check_parameters(generate(regex="a", stop=pb.StopConditions(ignore_eos=True)), LIMITS)
    validation.check_parameters(generate(regex="a", stop=pb.StopConditions(ignore_eos=False)), LIMITS)


def test_max_tokens_is_cut_to_what_fits() -> None:
    """Started tells the value in force."""
    asked = generate(stop=pb.StopConditions(max_tokens=1000, min_tokens=99))
    stop = validation.resolve(asked, [1] * 90, LIMITS, DEFAULTS, tiny()).stop
    assert (stop.max_tokens, stop.min_tokens) == (10, 10)


def test_a_prompt_that_leaves_no_room_is_out_of_range_with_the_limit() -> None:
    """R23 reaches clients as OUT_OF_RANGE."""
    validation.resolve(generate(), [1] * 99, LIMITS, DEFAULTS, tiny())
    with pytest.raises(OutOfRange) as caught:
        validation.resolve(generate(), [1] * 100, LIMITS, DEFAULTS, tiny())
    assert caught.value.reason == "PROMPT_TOO_LONG"
    assert caught.value.metadata == {"limit": "99", "prompt_tokens": "100", "max_model_len": "100"}


def test_a_prompt_of_no_tokens_is_refused() -> None:
    """Text that the tokenizer turns into nothing."""
    with pytest.raises(InvalidArgument, match="no tokens"):
        validation.resolve(generate(), [], LIMITS, DEFAULTS, tiny())


@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe", b"\x12\x05ab"])
def test_what_is_no_message_is_an_invalid_argument(raw: bytes) -> None:
    """Malformed protobuf, invalid UTF-8, a cut message."""
    with pytest.raises(InvalidArgument) as caught:
        validation.parse(pb.GenerateRequest, raw)
    assert caught.value.violations[0].field == "request"


def test_defaults_come_from_the_generation_config() -> None:
    """Missing and null entries keep ours."""
    config = {"temperature": 0.6, "top_k": None, "eos_token_id": [0]}
    assert SamplingDefaults.from_generation_config(config) == SamplingDefaults(0.6, 1.0, 0)
    config = {"repetition_penalty": 1.1, "min_p": 0.05}
    assert SamplingDefaults.from_generation_config(config) == SamplingDefaults(1.0, 1.0, 0, 0.05, 1.1)


def test_request_ids() -> None:
    """UUIDv7 when absent, sortable by time; the caller's own is checked."""
    ids = [new_request_id() for _ in range(50)]
    assert len(set(ids)) == 50
    assert all(made[14] == "7" and made[19] in "89ab" for made in ids)
    assert accept_request_id("my-id_1:2") == "my-id_1:2"
    for bad in ("a b", "x" * 129, "é", "a/b"):
        with pytest.raises(InvalidArgument, match="x-request-id"):
            accept_request_id(bad)
