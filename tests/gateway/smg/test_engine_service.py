"""VllmEngine on a real stack, called as SGLang Model Gateway calls it."""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator

import grpc
import pytest

from protos.routers.v1 import smg_common_pb2
from protos.routers.v1 import vllm_engine_pb2 as pb
from protos.routers.v1.vllm_engine_pb2_grpc import VllmEngineStub
from tests.support.services.served_stack import ServedStack

pytestmark = pytest.mark.processes

PROMPT = pb.TokenizedInput(original_text="hello", input_ids=b"hello")


@pytest.fixture
def engine(stack: ServedStack) -> Iterator[VllmEngineStub]:
    """The service's stub."""
    with grpc.insecure_channel(stack.grpc_address) as channel:
        yield VllmEngineStub(channel)


def request(*, stream: bool = False, **params: object) -> pb.GenerateRequest:
    """Of a prompt of five tokens."""
    sampling = pb.SamplingParams(**{"top_p": 1.0, "seed": 5, "max_tokens": 9, "skip_special_tokens": True, **params})
    return pb.GenerateRequest(tokenized=PROMPT, sampling_params=sampling, stream=stream)


def refusal(engine: VllmEngineStub, asked: pb.GenerateRequest) -> str:
    """What an INVALID_ARGUMENT says."""
    with pytest.raises(grpc.RpcError) as caught:
        list(engine.Generate(asked, timeout=40))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return str(caught.value.details())


def test_chunks_have_the_tokens_of_the_whole(engine: VllmEngineStub) -> None:
    """Two outputs: chunks add up to what Complete says without them, with their log probabilities."""
    wish: dict[str, object] = {"n": 2, "logprobs": 2, "prompt_logprobs": 1}
    whole = {answer.complete.index: answer.complete for answer in engine.Generate(request(**wish), timeout=40)}
    tokens: dict[int, list[int]] = {0: [], 1: []}
    values: dict[int, list[float]] = {0: [], 1: []}
    ends = {}
    for answer in engine.Generate(request(stream=True, **wish), timeout=40):
        if answer.HasField("complete"):
            ends[answer.complete.index] = answer.complete
            continue
        chunk = answer.chunk
        assert chunk.completion_tokens == len(chunk.token_ids) == len(chunk.output_logprobs.token_logprobs)
        assert list(chunk.output_logprobs.token_ids) == list(chunk.token_ids)
        assert {len(top.values) for top in chunk.output_logprobs.top_logprobs} == {2}
        tokens[chunk.index] += chunk.token_ids
        values[chunk.index] += chunk.output_logprobs.token_logprobs
    assert {index: list(end.output_ids) for index, end in whole.items()} == tokens
    assert {index: list(end.output_logprobs.token_logprobs) for index, end in whole.items()} == values
    for index in (0, 1):
        end = ends[index]
        assert not end.output_ids
        assert (end.finish_reason, end.completion_tokens, end.prompt_tokens) == ("length", 9, 5)
        assert list(end.input_logprobs.token_ids) == list(b"hello")
        assert [one.HasField("value") for one in end.input_logprobs.token_logprobs] == [False, True, True, True, True]


def test_what_ended_an_output(engine: VllmEngineStub) -> None:
    """A token and a string, by name."""
    [whole] = engine.Generate(request(), timeout=40)
    third = whole.complete.output_ids[2]
    [by_token] = engine.Generate(request(stop_token_ids=[third]), timeout=40)
    assert (by_token.complete.finish_reason, by_token.complete.matched_token_id) == ("stop", third)
    text = bytes(whole.complete.output_ids[2:4]).decode()
    [by_string] = engine.Generate(request(stop=[text]), timeout=40)
    assert (by_string.complete.finish_reason, by_string.complete.matched_stop_str) == ("stop", text)


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
        ({"mm_inputs": b""}, "mm_inputs"),
        ({"extra_mm_inputs": [b""]}, "extra_mm_inputs"),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"sampling_params": pb.SamplingParams(structural_tag="{}")}, "structural_tag"),
        ({"sampling_params": pb.SamplingParams(logprobs=-1)}, "logprobs"),
        ({"sampling_params": pb.SamplingParams(logit_bias={-1: 1.0})}, "logit_bias"),
        ({"sampling_params": pb.SamplingParams(temperature=-1)}, "temperature"),
        ({"request_id": "a b"}, "request_id"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    engine: VllmEngineStub, wanted: dict[str, object], field: str
) -> None:
    """INVALID_ARGUMENT that names the field."""
    assert field in refusal(engine, pb.GenerateRequest(**{"tokenized": PROMPT, **wanted}))


def test_an_aborted_request_ends(engine: VllmEngineStub) -> None:
    """By its id, from another call; an unknown id is no error."""
    asked = request(stream=True, max_tokens=4000, ignore_eos=True)
    asked.request_id = "chatcmpl-1"
    answers = engine.Generate(asked, timeout=40)
    assert next(iter(answers)).HasField("chunk")
    engine.Abort(pb.AbortRequest(request_ids=["chatcmpl-1", "unknown"]), timeout=40)
    with pytest.raises(grpc.RpcError) as caught:
        list(answers)
    assert caught.value.code() is grpc.StatusCode.CANCELLED


def test_embeddings(engine: VllmEngineStub) -> None:
    """A vector of a prompt."""
    answer = engine.Embed(pb.EmbedRequest(request_id="e-1", tokenized=PROMPT), timeout=40)
    assert answer.embedding_dim == len(answer.embedding) > 0 and answer.prompt_tokens == 5


def test_model_server_and_load(engine: VllmEngineStub) -> None:
    """As the other interfaces say."""
    assert engine.HealthCheck(pb.HealthCheckRequest(), timeout=40).healthy
    model = engine.GetModelInfo(pb.GetModelInfoRequest(), timeout=40)
    assert (model.served_model_name, model.max_context_length, model.is_generation) == ("simulated", 4096, True)
    assert json.loads(model.default_sampling_params_json)["temperature"] == 1.0
    server = engine.GetServerInfo(pb.GetServerInfoRequest(), timeout=40)
    [load] = engine.GetLoads(pb.GetLoadsRequest(), timeout=40).loads
    assert server.max_num_seqs == load.max_running_requests > 0
    assert load.max_total_num_tokens % server.block_size == 0 and load.max_total_num_tokens > 0
    with pytest.raises(grpc.RpcError, match="dp_rank"):
        engine.GetLoads(pb.GetLoadsRequest(dp_rank=1), timeout=40)


def test_the_tokenizer_is_an_archive(engine: VllmEngineStub) -> None:
    """Its digest is in the last part; the tokenizer tokenises."""
    chunks = list(engine.GetTokenizer(smg_common_pb2.GetTokenizerRequest(), timeout=40))
    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert {"tokenizer.json", "tokenizer_config.json"} <= set(archive.namelist())
        assert json.loads(archive.read("tokenizer.json"))["model"]
