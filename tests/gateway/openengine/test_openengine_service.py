"""openengine.v1 on a real stack."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from gateway_svc.openengine.descriptions import SCHEMA_RELEASE
from protos.inference.v1 import inference_pb2
from protos.inference.v1.inference_pb2_grpc import InferenceServiceStub
from protos.routers.v1 import openengine_pb2 as pb
from protos.routers.v1.openengine_pb2_grpc import ControlStub, InferenceStub
from svc_common.version import VERSION
from tests.support.services.served_stack import ServedStack

pytestmark = pytest.mark.processes

PROMPT = pb.TokenIds(ids=b"hello")
TIMEOUT_S = 40


@pytest.fixture(scope="module")
def channel(stack: ServedStack) -> Iterator[grpc.Channel]:
    """To the gateway."""
    with grpc.insecure_channel(stack.grpc_address) as opened:
        yield opened


@pytest.fixture
def inference(channel: grpc.Channel) -> InferenceStub:
    """The data plane."""
    return InferenceStub(channel)


@pytest.fixture
def control(channel: grpc.Channel) -> ControlStub:
    """The control plane."""
    return ControlStub(channel)


def request(**changes: Any) -> pb.GenerateRequest:
    """Of a prompt of five tokens, for nine tokens."""
    parts = {"token_ids": PROMPT, "sampling": pb.SamplingParams(seed=5), "stopping": pb.StoppingOptions(max_tokens=9)}
    return pb.GenerateRequest(**{**parts, **changes})


def answers(stub: InferenceStub, asked: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """All events."""
    return list(stub.Generate(asked, timeout=TIMEOUT_S))


def tokens_of(events: list[pb.GenerateResponse], index: int = 0) -> list[pb.TokenInfo]:
    """Those of one output."""
    outputs = (event.token for event in events if event.HasField("token"))
    return [info for output in outputs if output.output_index == index for info in output.tokens]


def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """Status and text of a call that fails, with no message before."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call()) if callable(call) else list(call)
    return caught.value.code(), str(caught.value.details())


def test_events_of_two_outputs(channel: grpc.Channel, inference: InferenceStub) -> None:
    """Tokens, texts, log probabilities and ends are those of Quire's own interface; the usage is in the last event alone."""
    top = pb.CandidateTokenSelection(top_n=2)
    response = pb.ResponseOptions(
        return_output_logprobs=True, output_candidates=top, return_prompt_logprobs=True, prompt_candidates=top
    )
    events = answers(inference, request(sampling=pb.SamplingParams(seed=5, num_sequences=2), response=response))
    own = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=b"hello"),
        sampling=inference_pb2.SamplingParams(seed=5, n=2),
        stop=inference_pb2.StopConditions(max_tokens=9),
        response=inference_pb2.ResponseOptions(logprobs=True, num_top_logprobs=2, num_prompt_logprobs=2),
    )
    whole = InferenceServiceStub(channel).Generate(own, timeout=TIMEOUT_S)
    for choice in whole.choices:
        infos = tokens_of(events, choice.index)
        assert [info.token_id for info in infos] == list(choice.token_ids)
        assert [info.logprob for info in infos] == list(choice.logprobs)
        tops = [[(each.token_id, each.logprob) for each in info.candidates] for info in infos]
        assert tops == [list(zip(top.token_ids, top.logprobs, strict=True)) for top in choice.top_logprobs]
        texts = (event.token for event in events if event.HasField("token"))
        assert "".join(each.text for each in texts if each.output_index == choice.index) == choice.text
    [prompt] = [event.prompt.tokens for event in events if event.HasField("prompt")]
    assert [info.token for info in prompt] == list("hello")
    assert [info.HasField("logprob") for info in prompt] == [False, True, True, True, True]
    assert [info.logprob for info in prompt[1:]] == list(whole.prompt_logprobs.logprobs)
    ends = [event for event in events if event.HasField("finished")]
    assert sorted(end.finished.output_index for end in ends) == [0, 1]
    assert {end.finished.reason for end in ends} == {pb.FINISH_REASON_LENGTH}
    assert [event.HasField("usage") for event in events] == [False] * (len(events) - 1) + [True]
    usage = events[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 18, 23)
    assert len({event.request_id for event in events}) == 1 and events[0].request_id


def test_text_is_tokenised_and_ends_are_named(inference: InferenceStub) -> None:
    """As the same prompt in tokens; a stop token is left out unless it is wanted; log probabilities only where asked for."""
    plain = tokens_of(answers(inference, request()))
    whole = pb.GenerateRequest(prompt="hello", model="simulated", request_id="e-1")
    whole.sampling.seed, whole.stopping.max_tokens = 5, 9
    events = answers(inference, whole)
    assert {event.request_id for event in events} == {"e-1"}
    assert [info.token_id for info in tokens_of(events)] == [info.token_id for info in plain]
    assert not any(info.HasField("logprob") or info.candidates for info in plain)
    ids = [info.token_id for info in plain]
    stop = pb.StoppingOptions(max_tokens=9, conditions=[pb.StopCondition(stop_token_id=ids[2])])
    events = answers(inference, request(stopping=stop))
    num_before = ids.index(ids[2])
    assert [info.token_id for info in tokens_of(events)] == ids[:num_before]
    end = events[-1].finished
    assert (end.reason, end.stop_match.stop_token_id) == (pb.FINISH_REASON_STOP, ids[2])
    text = bytes(ids[2:4]).decode()
    stop = pb.StoppingOptions(max_tokens=9, conditions=[pb.StopCondition(stop_text=text)])
    assert answers(inference, request(stopping=stop))[-1].finished.stop_match.stop_text == text


@pytest.mark.parametrize(
    ("changes", "metadata", "code", "word"),
    [
        ({"model": "other"}, (), "NOT_FOUND", "other"),
        ({"lora_name": "other"}, (), "NOT_FOUND", "other"),
        ({"lora_name": "simulated"}, (), "NOT_FOUND", "no adapter"),
        ({"request_id": "a b"}, (), "INVALID_ARGUMENT", "request_id"),
        ({"token_ids": pb.TokenIds(ids=[2**31])}, (), "INVALID_ARGUMENT", "token_ids"),
        ({"sampling": pb.SamplingParams(num_sequences=0)}, (), "INVALID_ARGUMENT", "sampling.num_sequences"),
        ({"stopping": pb.StoppingOptions(max_tokens=0)}, (), "INVALID_ARGUMENT", "stopping.max_tokens"),
        ({"guided": pb.GuidedDecoding(regex="(")}, (), "INVALID_ARGUMENT", "guided.regex"),
        ({"guided": pb.GuidedDecoding(choice={})}, (), "INVALID_ARGUMENT", "guided.choice"),
        ({}, (("openengine-target-dp-rank", "1"),), "INVALID_ARGUMENT", "openengine-target-dp-rank"),
        ({}, (("openengine-priority", "1"), ("openengine-priority", "2")), "INVALID_ARGUMENT", "openengine-priority"),
        ({}, (("openengine-priority", str(-(2**31))),), "INVALID_ARGUMENT", "openengine-priority"),
    ],
)
def test_what_is_refused_before_acceptance(
    inference: InferenceStub, changes: dict[str, Any], metadata: Any, code: str, word: str
) -> None:
    """By a status that names the field as it was sent."""
    status, text = refusal(inference.Generate(request(**changes), timeout=TIMEOUT_S, metadata=metadata))
    assert status.name == code and word in text


def test_an_aborted_request_ends_with_one_error(inference: InferenceStub, control: ControlStub) -> None:
    """The last event, with what it used; the stream is OK. By its id, and with all others of the tenant."""
    long = pb.StoppingOptions(max_tokens=4000, ignore_eos=True)
    for target, status in (
        ({"request_id": "a-1"}, pb.ABORT_STATUS_ABORTED),
        ({"all_requests": pb.AllRequests()}, pb.ABORT_STATUS_ABORTED),
    ):
        call = inference.Generate(request(stopping=long, request_id="a-1"), timeout=TIMEOUT_S)
        assert next(iter(call)).HasField("token")
        assert control.Abort(pb.AbortRequest(**target), timeout=TIMEOUT_S).status == status
        events = list(call)
        assert call.code() is grpc.StatusCode.OK
        assert [event.HasField("error") for event in events] == [False] * (len(events) - 1) + [True]
        assert (events[-1].error.code, events[-1].error.retryable) == (pb.ERROR_CODE_CANCELLED, False)
        assert events[-1].usage.prompt_tokens == 5 and events[-1].usage.completion_tokens > 0
    nothing = control.Abort(pb.AbortRequest(all_requests=pb.AllRequests()), timeout=TIMEOUT_S)
    assert nothing.status == pb.ABORT_STATUS_ALREADY_FINISHED


@pytest.mark.parametrize(
    ("target", "code"),
    [({"request_id": "unknown"}, "NOT_FOUND"), ({"kv_session": b""}, "NOT_FOUND"), ({}, "INVALID_ARGUMENT")],
)
def test_what_cannot_be_aborted(control: ControlStub, target: dict[str, Any], code: str) -> None:
    """Is refused."""
    assert refusal(lambda: control.Abort(pb.AbortRequest(**target), timeout=TIMEOUT_S))[0].name == code


def test_server_model_and_load(control: ControlStub) -> None:
    """As the other interfaces say."""
    server = control.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S)
    assert (server.engine_name, server.engine_version, list(server.supported_models)) == (
        "quire",
        VERSION,
        ["simulated"],
    )
    assert (server.engine_role, server.kv_connector.enabled) == (pb.ENGINE_ROLE_AGGREGATED, False)
    assert (server.schema_revision, server.minimum_client_revision, server.schema_release) == (1, 1, SCHEMA_RELEASE)
    model = control.GetModelInfo(pb.GetModelInfoRequest(model="simulated"), timeout=TIMEOUT_S)
    assert (model.served_model_name, model.max_context_length, model.max_output_tokens) == ("simulated", 4096, 4095)
    assert model.generation.output_logprobs.max_top_n == 20
    for name, code in (("", "INVALID_ARGUMENT"), ("other", "NOT_FOUND")):
        asked = pb.GetModelInfoRequest(model=name)
        assert refusal(lambda asked=asked: control.GetModelInfo(asked, timeout=TIMEOUT_S))[0].name == code
    load = control.GetLoad(pb.GetLoadRequest(include_per_rank=True), timeout=TIMEOUT_S)
    assert load.total_kv_blocks == server.capacity.total_kv_blocks > 0
    assert load.instance_id == server.instance_id and load.HasField("running_requests")
    [rank] = load.ranks
    assert (rank.data_parallel_rank, rank.total_kv_blocks) == (0, load.total_kv_blocks)
    assert not control.GetLoad(pb.GetLoadRequest(), timeout=TIMEOUT_S).ranks


def test_health_with_a_real_token(control: ControlStub) -> None:
    """The probe is a request; another role than this one's is not ready."""
    probed = control.Health(pb.HealthRequest(include_inference_probe=True), timeout=TIMEOUT_S)
    assert probed.state == pb.HEALTH_STATE_READY
    assert [check.name for check in probed.checks] == ["grpc", "scheduler", "model", "inference_probe"]
    other = control.Health(pb.HealthRequest(role=pb.ENGINE_ROLE_PREFILL), timeout=TIMEOUT_S)
    assert other.state == other.checks[-1].state == pb.HEALTH_STATE_NOT_READY
    unknown = pb.HealthRequest(include_inference_probe=True, model="other")
    assert refusal(lambda: control.Health(unknown, timeout=TIMEOUT_S))[0] is grpc.StatusCode.NOT_FOUND


def test_adapters_and_sources(stack: ServedStack, control: ControlStub) -> None:
    """Listed; changed by operators alone. The source is the port of the call."""
    assert not control.ListLoras(pb.ListLorasRequest(), timeout=TIMEOUT_S).adapters
    status, text = refusal(lambda: control.LoadLora(pb.LoadLoraRequest(), timeout=TIMEOUT_S))
    assert status is grpc.StatusCode.UNIMPLEMENTED and "quire adapters load" in text
    [source] = control.GetKvEventSources(pb.GetKvEventSourcesRequest(), timeout=TIMEOUT_S).sources
    assert f"{source.endpoint_addr.host}:{source.endpoint_addr.port}" == stack.grpc_address
    other = pb.GetKvEventSourcesRequest(data_parallel_ranks=[1])
    assert not control.GetKvEventSources(other, timeout=TIMEOUT_S).sources
