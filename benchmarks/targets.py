"""Whom we ask: our gRPC API, or any OpenAI endpoint. Each target streams one request and stamps its record.

Only standard OpenAI fields go out, and `ignore_eos` where wanted (an extension that vLLM and others share).
"""

import json
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import grpc.aio
import httpx

from benchmarks.measure import Record
from benchmarks.workloads import Planned
from protos.inference.v1 import inference_pb2, inference_pb2_grpc
from svc_common import rpc

Clock = Callable[[], float]


class Target(Protocol):
    """An async context manager that can stream."""

    name: str

    async def __aenter__(self) -> "Target": ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    async def stream(self, planned: Planned, record: Record, clock: Clock) -> None:
        """Sends, and fills `record` as tokens come; transport and server errors are raised."""


class GrpcTarget:
    """`quire.inference.v1` at HOST:PORT. `num_channels` connections, used in turn."""

    def __init__(self, address: str, *, ignore_eos: bool, timeout_s: float, num_channels: int = 4) -> None:
        self.name = f"grpc://{address}"
        self._address = address
        self._ignore_eos = ignore_eos
        self._timeout_s = timeout_s
        self._num_channels = num_channels
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: list[inference_pb2_grpc.InferenceServiceStub] = []

    async def __aenter__(self) -> "GrpcTarget":
        # Channels to one address share a connection unless each has a subchannel pool of its own.
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(self._address, options) for _ in range(self._num_channels)]
        self._stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in self._channels]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for channel in self._channels:
            await channel.close()

    def _request(self, planned: Planned) -> inference_pb2.GenerateRequest:
        request = inference_pb2.GenerateRequest(
            sampling=inference_pb2.SamplingParams(temperature=0.0),
            stop=inference_pb2.StopConditions(max_tokens=planned.max_tokens, ignore_eos=self._ignore_eos),
        )
        if planned.token_ids:
            request.token_ids.ids.extend(planned.token_ids)
        else:
            request.text = planned.text
        return request

    async def stream(self, planned: Planned, record: Record, clock: Clock) -> None:
        """One GenerateStream call."""
        stub = self._stubs[planned.index % len(self._stubs)]
        record.sent_s = clock()
        async for event in stub.GenerateStream(self._request(planned), timeout=self._timeout_s):
            kind = event.WhichOneof("event")
            if kind == "delta" and event.delta.token_ids:
                record.token_times_s.append(clock())
                record.output_tokens += len(event.delta.token_ids)
            elif kind == "usage":
                record.prompt_tokens = event.usage.prompt_tokens
                record.cached_tokens = event.usage.cached_prompt_tokens


class OpenAITarget:
    """`/v1/completions` (or chat) below a base address such as http://127.0.0.1:8000; key from OPENAI_API_KEY."""

    def __init__(self, url: str, *, model: str, ignore_eos: bool, timeout_s: float, chat: bool = False) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        self.name = base
        self._model = model
        self._chat = chat
        self._ignore_eos = ignore_eos
        self._path = f"{base}/v1/{'chat/completions' if chat else 'completions'}"
        self._models = f"{base}/v1/models"
        key = os.environ.get("OPENAI_API_KEY", "")
        self._http = httpx.AsyncClient(
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            headers={"authorization": f"Bearer {key}"} if key else {},
        )

    async def __aenter__(self) -> "OpenAITarget":
        if not self._model:
            reply = await self._http.get(self._models)
            reply.raise_for_status()
            self._model = reply.json()["data"][0]["id"]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._http.aclose()

    def _body(self, planned: Planned) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": planned.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._chat:
            body["messages"] = [{"role": "user", "content": planned.text}]
        else:
            body["prompt"] = list(planned.token_ids) or planned.text
        if self._ignore_eos:
            body["ignore_eos"] = True
        return body

    async def stream(self, planned: Planned, record: Record, clock: Clock) -> None:
        """One streamed POST; output tokens come from usage, or are counted by message where it is not sent."""
        record.sent_s = clock()
        async with self._http.stream("POST", self._path, json=self._body(planned)) as reply:
            if reply.status_code != httpx.codes.OK:
                raise RuntimeError(f"HTTP {reply.status_code}: {(await reply.aread())[:200].decode(errors='replace')}")
            async for line in reply.aiter_lines():
                if line.startswith("data:") and (payload := line[5:].strip()) != "[DONE]":
                    self._take(json.loads(payload), record, clock)
        record.output_tokens = record.output_tokens or len(record.token_times_s)

    def _take(self, chunk: dict[str, Any], record: Record, clock: Clock) -> None:
        if "error" in chunk:
            raise RuntimeError(str(chunk["error"]))
        if any(_says_something(choice) for choice in chunk.get("choices") or ()):
            record.token_times_s.append(clock())
        if usage := chunk.get("usage"):
            record.prompt_tokens = usage.get("prompt_tokens", 0)
            record.output_tokens = usage.get("completion_tokens", 0)
            record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _says_something(choice: dict[str, Any]) -> bool:
    return bool(choice.get("text") or (choice.get("delta") or {}).get("content"))


def error_name(error: BaseException) -> str:
    """Short, stable text to count errors by."""
    if isinstance(error, grpc.RpcError):
        known = rpc.from_rpc_error(error)
        return f"{known.status} {known.reason}".strip()
    return f"{type(error).__name__}: {error}"[:200]
