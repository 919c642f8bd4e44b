"""Requests, events, errors and metadata of OpenEngine, converted without a stack."""

from typing import Any

import pytest
from opentelemetry.trace import INVALID_SPAN

from gateway_svc.calls import Call, ServiceGoals
from gateway_svc.cell.kv_publisher import KvEndpoints
from gateway_svc.openengine.contract_answers import OpenEngineAnswer
from gateway_svc.openengine.contract_requests import TokenDetails, generate_request
from gateway_svc.openengine.engine_errors import engine_error, name_as_sent
from gateway_svc.openengine.kv_event_stream import OpenEngineKvBatches, event_sources
from gateway_svc.openengine.routing_metadata import PRIORITY, TARGET_DP_RANK, with_routing
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from protos.inference.v1 import inference_pb2
from protos.routers.v1 import openengine_pb2 as pb
from svc_common.errors import (
    Cancelled,
    DeadlineExceeded,
    FieldViolation,
    Internal,
    InvalidArgument,
    QuireError,
    Unavailable,
)
from tests.support.services import models

CALL = Call("r", 0, INVALID_SPAN, stream=True)
EVERYTHING = pb.GenerateRequest(
    prompt="hi",
    sampling=pb.SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=-1,
        min_p=0.125,
        frequency_penalty=1.5,
        presence_penalty=-1.5,
        repetition_penalty=2,
        seed=2**64 - 1,
        num_sequences=3,
    ),
    stopping=pb.StoppingOptions(
        max_tokens=9,
        min_tokens=2,
        conditions=[pb.StopCondition(stop_text="x"), pb.StopCondition(stop_token_id=7)],
        ignore_eos=True,
        include_stop_in_output=True,
    ),
    response=pb.ResponseOptions(
        return_output_logprobs=True,
        output_candidates=pb.CandidateTokenSelection(top_n=2),
        return_prompt_logprobs=True,
    ),
    kv=pb.KvOptions(bypass_prefix_cache=True, cache_salt="s"),
)


def test_every_field_has_its_place() -> None:
    """Of a request that sets all that is served."""
    made = generate_request(EVERYTHING)
    assert made == inference_pb2.GenerateRequest(
        text="hi",
        sampling=inference_pb2.SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=0,
            min_p=0.125,
            frequency_penalty=1.5,
            presence_penalty=-1.5,
            repetition_penalty=2,
            seed=2**64 - 1,
            n=3,
        ),
        stop=inference_pb2.StopConditions(
            max_tokens=9, min_tokens=2, stop_strings=["x"], stop_token_ids=[7], ignore_eos=True, include_in_output=True
        ),
        response=inference_pb2.ResponseOptions(logprobs=True, num_top_logprobs=2, num_prompt_logprobs=0),
        cache=inference_pb2.CacheOptions(no_reuse=True, cache_salt="s"),
    )


def test_what_is_absent_stays_absent() -> None:
    """So that the model's defaults apply."""
    made = generate_request(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), extra=b""))
    assert [field.name for field, _ in made.sampling.ListFields()] == ["n"]
    assert not made.stop.HasField("max_tokens") and not made.response.ListFields()


@pytest.mark.parametrize(
    ("guide", "made"),
    [
        ({"json_schema": "{}"}, {"json_schema": "{}"}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"json_object": pb.JsonObjectConstraint()}, {"json_schema": '{"type": "object"}'}),
        (
            {"choice": pb.ChoiceConstraint(choices=["a", "b"]), "backend": "llguidance"},
            {"choice": inference_pb2.ChoiceList(choices=["a", "b"])},
        ),
    ],
)
def test_guides(guide: dict[str, Any], made: dict[str, Any]) -> None:
    """Each kind that is served."""
    request = generate_request(pb.GenerateRequest(prompt="a", guided=pb.GuidedDecoding(**guide)))
    assert request == inference_pb2.GenerateRequest(text="a", sampling=inference_pb2.SamplingParams(n=1), **made)


def _candidates(**selection: Any) -> dict[str, Any]:
    return {"response": pb.ResponseOptions(output_candidates=pb.CandidateTokenSelection(**selection))}


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"media": [b""]}, "media"),
        ({"kv": pb.KvOptions(session=b"")}, "kv.session"),
        ({"sampling": pb.SamplingParams(top_k=-2)}, "sampling.top_k"),
        ({"stopping": pb.StoppingOptions(conditions=[{}])}, "stopping.conditions[0]"),
        ({"response": pb.ResponseOptions(prompt_logprob_start=1)}, "response.prompt_logprob_start"),
        (_candidates(), "response.output_candidates"),
        (_candidates(token_ids=pb.TokenIds(ids=[1])), "response.output_candidates.token_ids"),
        (_candidates(all=pb.AllCandidates()), "response.output_candidates.all"),
        ({"guided": pb.GuidedDecoding()}, "guided"),
        ({"guided": pb.GuidedDecoding(ebnf_grammar="root ::= 'a'")}, "guided.ebnf_grammar"),
        ({"guided": pb.GuidedDecoding(structural_tag="{}")}, "guided.structural_tag"),
        ({"guided": pb.GuidedDecoding(regex="a", backend="xgrammar")}, "guided.backend"),
    ],
)
def test_what_is_not_served_is_refused_by_name(wanted: dict[str, Any], field: str) -> None:
    """Before anything else is looked at."""
    with pytest.raises(InvalidArgument) as caught:
        generate_request(pb.GenerateRequest(prompt="a", **wanted))
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize(("raw", "path"), [(b"\x70\x01", "request"), (b"\x2a\x03\x98\x06\x01", "sampling")])
def test_fields_of_later_revisions_are_refused(raw: bytes, path: str) -> None:
    """Which might change the output, at any depth."""
    request = pb.GenerateRequest.FromString(EVERYTHING.SerializeToString() + raw)
    with pytest.raises(InvalidArgument, match="schema revision 1") as caught:
        generate_request(request)
    assert caught.value.violations[0].field == path


def test_errors_name_fields_as_they_were_sent() -> None:
    """Those of Quire's checks."""
    ours = (
        "sampling.n",
        "stop.max_tokens",
        "stop.stop_strings[2]",
        "text",
        "prompt",
        "cache.cache_salt",
        "sampling.top_p",
    )
    error = InvalidArgument("m", violations=[FieldViolation(name, "is wrong") for name in ours])
    name_as_sent(error)
    assert [violation.field for violation in error.violations] == [
        "sampling.num_sequences",
        "stopping.max_tokens",
        "stopping.conditions.stop_text[2]",
        "prompt",
        "input",
        "kv.cache_salt",
        "sampling.top_p",
    ]
    assert error.message.startswith("sampling.num_sequences: is wrong; ")


@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [
        (Cancelled("m", reason="CANCELLED"), pb.ERROR_CODE_CANCELLED, False),
        (Unavailable("m", reason="DRAINING"), pb.ERROR_CODE_DRAINING, True),
        (Unavailable("m", reason="NO_WORKER"), pb.ERROR_CODE_INTERNAL, True),
        (DeadlineExceeded("m", reason="EXPIRED_IN_QUEUE"), pb.ERROR_CODE_OVERLOADED, True),
        (DeadlineExceeded("m", reason="INFEASIBLE"), pb.ERROR_CODE_CANCELLED, False),
        (Internal("m", reason="INTERNAL"), pb.ERROR_CODE_INTERNAL, False),
    ],
)
def test_failures_after_acceptance(error: QuireError, code: int, retryable: bool) -> None:
    """Code, whether a retry can help, and the documented reason in the text."""
    told = engine_error(error)
    assert (told.code, told.retryable, told.message) == (code, retryable, f"{error.reason}: m")


# --- events ----------------------------------------------------------------------------------------------------------


def _answer(request: pb.GenerateRequest, num_outputs: int = 1) -> OpenEngineAnswer:
    return OpenEngineAnswer("r", [65, 66], num_outputs, TokenDetails.of(request), models.tiny())


def _delta(choice: int, *token_ids: int, text: str = "t") -> inference_pb2.Delta:
    return inference_pb2.Delta(choice=choice, token_ids=token_ids, text=text)


def _end(choice: int, **match: Any) -> inference_pb2.Finished:
    reason = common_pb2.FINISH_REASON_STOP if match else common_pb2.FINISH_REASON_LENGTH
    return inference_pb2.Finished(choice=choice, reason=reason, **match)


USAGE = inference_pb2.Usage(prompt_tokens=2, completion_tokens=3, cached_prompt_tokens=1)


def test_only_the_last_event_has_the_usage() -> None:
    """The end of the output that ends last waits for it; each event has its output's number, 0 too."""
    answer = _answer(pb.GenerateRequest(), num_outputs=2)
    told = [*answer.take([_delta(1, 67), _end(1)]), *answer.take([_delta(0, 67, 68), _end(0)]), *answer.take([USAGE])]
    assert [each.WhichOneof("event") for each in told] == ["token", "finished", "token", "finished"]
    assert [getattr(each, each.WhichOneof("event")).output_index for each in told] == [1, 1, 0, 0]
    assert all(getattr(each, each.WhichOneof("event")).HasField("output_index") for each in told)
    assert [each.HasField("usage") for each in told] == [False, False, False, True]
    usage = told[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, usage.cached_prompt_tokens) == (
        2,
        3,
        5,
        1,
    )


@pytest.mark.parametrize(("keeps", "shown"), [(False, [67]), (True, [67, 7])])
def test_a_stop_token_of_the_request_is_told_if_wanted(keeps: bool, shown: list[int]) -> None:
    """It ended the output by what the request named; an end token of the model is not left out."""
    conditions = [pb.StopCondition(stop_token_id=7)]
    answer = _answer(
        pb.GenerateRequest(stopping=pb.StoppingOptions(conditions=conditions, include_stop_in_output=keeps))
    )
    token, end = [*answer.take([_delta(0, 67, 7), _end(0, stop_token_id=7), USAGE])]
    assert [info.token_id for info in token.token.tokens] == shown
    assert end.finished.stop_match.stop_token_id == 7
    answer = _answer(pb.GenerateRequest())
    token, end = [*answer.take([_delta(0, 67, 7), _end(0, stop_token_id=7), USAGE])]
    assert [info.token_id for info in token.token.tokens] == [67, 7] and end.finished.stop_match.eos_token_id == 7


def test_a_failure_counts_what_was_told() -> None:
    """Usage of an error."""
    answer = _answer(pb.GenerateRequest())
    assert len([*answer.take([_delta(0, 67, 68)])]) == 1
    told = answer.failure(Cancelled("m", reason="CANCELLED"))
    assert told.error.code == pb.ERROR_CODE_CANCELLED
    assert (told.usage.prompt_tokens, told.usage.completion_tokens, told.usage.total_tokens) == (2, 2, 4)
    assert not told.usage.HasField("cached_prompt_tokens")


# --- metadata and KV events ------------------------------------------------------------------------------------------


def test_priority_keeps_its_direction() -> None:
    """Higher = sooner here and there; a trusted router's counts more."""
    assert (
        with_routing([(PRIORITY, "-7"), (TARGET_DP_RANK, "0"), ("openengine-routing-key", "k")], CALL).goals.priority
        == -7
    )
    assert with_routing([("x-other", "1"), ("x-other", "2")], CALL) == CALL
    trusted = Call("r", 0, INVALID_SPAN, stream=True, goals=ServiceGoals(priority=3))
    assert with_routing([(PRIORITY, "9")], trusted).goals.priority == 3


@pytest.mark.parametrize(
    "pairs",
    [
        [(PRIORITY, "1.5")],
        [(PRIORITY, "")],
        [(PRIORITY, "2147483648")],
        [(PRIORITY, "1"), (PRIORITY, "1")],
        [(TARGET_DP_RANK, "1")],
        [("openengine-routing-key", "")],
        [(TARGET_DP_RANK, "-1")],
        [("openengine-routing-key", "a"), ("openengine-routing-key", "a")],
    ],
)
def test_malformed_metadata_is_refused_by_key(pairs: list[tuple[str, str]]) -> None:
    """As are repeated keys and ranks that there are not."""
    with pytest.raises(InvalidArgument) as caught:
        with_routing(pairs, CALL)
    assert caught.value.violations[0].field == pairs[0][0]


def test_batches_tell_runs_of_blocks() -> None:
    """The first one begins anew; hashes are eight bytes."""
    first = engine_pb2.StoredBlock(block_hash=-2, token_ids=[1, 2], lora_id=3)
    second = engine_pb2.StoredBlock(block_hash=5, parent_hash=-2, token_ids=[3, 4], lora_id=3)
    batches = OpenEngineKvBatches(9)
    batch = batches.batch(engine_pb2.SubscribeKvEventsResponse(stored=[first, second]))
    cleared, stored = batch.events
    assert cleared.HasField("all_blocks_cleared") and batch.sequence_number == 9
    run = stored.block_stored
    assert [each.value for each in run.block_hashes] == [b"\xff" * 7 + b"\xfe", b"\0" * 7 + b"\5"]
    assert (list(run.token_ids), run.block_size, run.lora_id) == ([1, 2, 3, 4], 2, 3) and not run.HasField(
        "parent_block_hash"
    )
    batch = batches.batch(engine_pb2.SubscribeKvEventsResponse(removed=[5], stored=[second]))
    removed, stored = batch.events
    assert (batch.sequence_number, removed.block_removed.block_hashes[0].value) == (10, b"\0" * 7 + b"\5")
    assert stored.block_stored.parent_block_hash.value == b"\xff" * 7 + b"\xfe"


def test_sources_never_name_a_wildcard() -> None:
    """They have this machine's address instead, or are left out; so are sockets of this machine alone."""
    at = KvEndpoints("tcp://0.0.0.0:5557", "tcp://*:5558", "kv")
    grpc_source, zmq_source = event_sources(("0.0.0.0", 50051), at, "10.0.0.7")
    assert (grpc_source.endpoint_addr.host, grpc_source.endpoint_addr.port) == ("10.0.0.7", 50051)
    assert (zmq_source.endpoint_addr.host, zmq_source.endpoint_addr.port, zmq_source.topic) == ("10.0.0.7", 5557, "kv")
    assert zmq_source.replay_endpoint == "tcp://10.0.0.7:5558"
    assert event_sources(("0.0.0.0", 50051), at, "") == []
    [only] = event_sources(("127.0.0.1", 1), KvEndpoints("ipc://@x"), "10.0.0.7")
    assert (only.transport, only.endpoint_addr.host) == ("grpc", "127.0.0.1")
