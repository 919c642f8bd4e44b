"""The gateway's two spans of a call: GenAI attributes, how a call failed, and content only where it is asked for (2.1, 2.4)."""

import json
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from protos.inference.v1 import inference_pb2 as pb
from protos.inference.v1 import inference_pb2_grpc
from quire.local_stack.otlp_receiver import OtlpReceiver, ReceivedSpan
from svc_common.observability import trace_names as names
from tests.support.services.harness import run_async
from tests.support.tracing_page import undocumented
from tests.traces.asks import KEYS
from tests.traces.coverage import STAGES
from tests.traces.serving import exporting, in_process, tenants_file

_WORKER = {"num_gpu_blocks": 200}
SECRET = "kanarienvogel"
Calls = list[tuple[str, Any, str]]


def _calls(tenants: Path, otlp: OtlpReceiver, calls: Calls, **gateway: Any) -> list[ReceivedSpan]:
    """All spans of these calls: method, message and whose key."""

    @run_async
    async def scenario() -> None:
        async with (
            in_process(_WORKER, {}, tenants=tenants, **gateway) as doors,
            grpc.aio.insecure_channel(doors[0]) as channel,
        ):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            for i, (method, message, tenant) in enumerate(calls):
                metadata = (("authorization", f"Bearer {KEYS[tenant]}"), ("x-request-id", f"call-{i}"))
                try:
                    await getattr(stub, method)(message, timeout=30, metadata=metadata)
                except grpc.aio.AioRpcError as error:
                    assert error.code() is not grpc.StatusCode.UNKNOWN

    scenario()
    assert undocumented(otlp.spans()) == []
    return otlp.spans()


def _chat(**changes: Any) -> pb.ChatRequest:
    stop = pb.StopConditions(max_tokens=5, ignore_eos=True, stop_strings=[f"{SECRET} stop"])
    return pb.ChatRequest(messages=[pb.Message(role="user", content=f"say {SECRET}")], stop=stop, **changes)


def test_genai_attributes(otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those required, those recommended; and not a word of what was said."""
    sampling = pb.SamplingParams(temperature=0.5, top_p=0.75, top_k=7, seed=11, n=2, frequency_penalty=0.5)
    with exporting(otlp, monkeypatch):
        spans = _calls(
            tenants_file(tmp_path), otlp, [("Chat", _chat(sampling=sampling, labels={"team": "red"}), "many")]
        )
    [root] = [span for span in spans if span.kind == "SERVER"]
    [chat] = [span for span in spans if span.name == "chat simulated"]
    assert chat.parent_id == root.span_id and chat.kind == "INTERNAL"
    assert root.attributes["rpc.method"] == "quire.inference.v1.InferenceService/Chat"
    assert root.attributes["server.address"] == "127.0.0.1" and root.attributes["server.port"] > 0
    known = dict(chat.attributes)
    assert known.pop("gen_ai.response.time_to_first_chunk") > 0 and known.pop("quire.queue_ms") >= 0
    assert known.pop("gen_ai.usage.input_tokens") > 10
    assert known == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": "simulated",
        "gen_ai.response.model": "simulated",
        "gen_ai.output.type": "text",
        "gen_ai.response.id": "call-0",
        "gen_ai.request.stream": False,
        "gen_ai.request.seed": 11,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.frequency_penalty": 0.5,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "quire.request_id": "call-0",
        "quire.seed": "11",
        "quire.label.team": "red",
        "quire.num_preemptions": 0,
        "quire.num_migrations": 0,
    }
    assert SECRET not in repr([(span.name, dict(span.attributes), span.events) for span in spans])


def test_content_is_there_where_it_is_asked_for(
    otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`--trace-content`: messages as the conventions write them, in the gateway's span and nowhere else."""
    calls: Calls = [
        ("Chat", _chat(), "many"),
        ("Generate", pb.GenerateRequest(text=f"a {SECRET}", stop=_chat().stop), "many"),
    ]
    with exporting(otlp, monkeypatch):
        spans = _calls(tenants_file(tmp_path), otlp, calls, trace_content=True)
    chat, text = (next(s for s in spans if s.name == f"{kind} simulated") for kind in ("chat", "text_completion"))
    part = {"type": "text", "content": f"say {SECRET}"}
    assert json.loads(chat.attributes[names.INPUT_MESSAGES]) == [{"role": "user", "parts": [part]}]
    assert json.loads(text.attributes[names.INPUT_MESSAGES])[0]["parts"][0]["content"] == f"a {SECRET}"
    [answer] = json.loads(chat.attributes[names.OUTPUT_MESSAGES])
    assert (answer["role"], answer["finish_reason"]) == ("assistant", "length")
    assert [part["type"] for part in answer["parts"]] == ["text"] and len(answer["parts"][0]["content"]) > 0
    assert chat.attributes[names.REQUEST_STOP_SEQUENCES] == (f"{SECRET} stop",)
    assert not [s for s in spans if s not in (chat, text) and SECRET in repr(dict(s.attributes))]


def test_refused_calls_say_why(otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A quota, a field that is wrong, a prompt that is too long, an unknown model: the event and its numbers on the root."""
    long = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[40] * 5_000))
    calls: Calls = [
        ("Chat", _chat(sampling=pb.SamplingParams(top_p=7)), "many"),
        ("Generate", long, "many"),
        ("Chat", _chat(model="nobody's"), "many"),
        *[("Generate", pb.GenerateRequest(text="a", stop=pb.StopConditions(max_tokens=40)), "few")] * 2,
    ]
    with exporting(otlp, monkeypatch):
        spans = _calls(tenants_file(tmp_path), otlp, calls)
    roots = {span.attributes[names.REQUEST_ID]: span for span in spans if span.kind == "SERVER"}
    refused = {name: root for name, root in roots.items() if names.ERROR_TYPE in root.attributes}
    assert {name: root.attributes[names.ERROR_TYPE] for name, root in refused.items()} == {
        "call-0": "INVALID_FIELD",
        "call-1": "PROMPT_TOO_LONG",
        "call-2": "MODEL_NOT_FOUND",
        "call-4": "TENANT_QUOTA",
    }
    events = {name: root.events for name, root in refused.items()}
    assert all([event.name for event in told if event.name not in STAGES] == ["refused"] for told in events.values())
    assert {name: root.status for name, root in refused.items()} == {
        "call-0": "UNSET",
        "call-1": "UNSET",
        "call-2": "UNSET",
        "call-4": "ERROR",
    }
    assert events["call-1"][-1].attributes["quire.limit"] == 4_095
    assert events["call-4"][-1].attributes[names.RETRY_AFTER_S] > 0
    assert not [
        span
        for span in spans
        if span.service != "quire-gateway" and span.trace_id in {r.trace_id for r in refused.values()}
    ]
