"""Clients of a gateway's gRPC door: `Client` blocks, `AsyncClient` awaits; same methods, same values.

    with Client("127.0.0.1:50051") as client:
        print(client.generate("def main():", SamplingParams(max_tokens=40)).text)
        for delta in client.generate_stream("import "):
            print(delta.text, end="")

Errors are the typed ones of svc_common.errors (`InvalidArgument`, `ResourceExhausted`, ...). The current OpenTelemetry context, if
the caller has one, travels along. Not here: the message forms (quire.messages), retries beyond gRPC's own.
"""

import json
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from opentelemetry import propagate

from protos.inference.v1 import inference_pb2 as pb
from protos.inference.v1 import inference_pb2_grpc
from quire import messages
from quire.calls import GATEWAY, typed_errors
from quire.messages import EventMerger, Message, Prompt, RequestOptions
from quire.outputs import EmbeddingRequestOutput, ModelCard, RequestOutput
from quire.sampling_params import PoolingParams, SamplingParams
from quire.streams import AsyncStream, Stream
from quire.value_checks import valid_ids, valid_request_id, valid_text
from svc_common import rpc

_NO_OPTIONS = RequestOptions()
_CONTROL_TIMEOUT_S = 30.0

# For connections that break: only UNAVAILABLE, and gRPC itself retries only before the first message, so nothing is generated
# twice. What a service answered is final (svc_common.rpc.abort sends the pushback), so that no wait of a gateway is repeated.
_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{"service": "quire.inference.v1.InferenceService"}],
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 3,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", rpc.PUBLIC_MESSAGE_BYTES),
    ("grpc.max_send_message_length", rpc.PUBLIC_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.service_config", _SERVICE_CONFIG),
]


def _metadata(request_id: str) -> list[tuple[str, str]]:
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    if valid_request_id(request_id):
        carrier["x-request-id"] = request_id
    return list(carrier.items())


class Client:
    """Blocking client; may be used from several threads. `timeout_s` of a call is its deadline (None = none)."""

    def __init__(self, target: str = "127.0.0.1:50051") -> None:
        self.target = target
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channel; running streams end."""
        self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions = _NO_OPTIONS,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> RequestOutput:
        """Completes text or token ids; without parameters the server's defaults apply (up to the model's context)."""
        request = messages.generate_request(prompt, sampling_params, options)
        with typed_errors(self.target, GATEWAY):
            response = self._stub.Generate(request, timeout=timeout_s, metadata=_metadata(request_id))
        return messages.merged(response, prompt)

    def generate_stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions = _NO_OPTIONS,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> Stream:
        """Completes text or token ids as a stream; iterate over it for deltas."""
        request = messages.generate_request(prompt, sampling_params, options)
        call = self._stub.GenerateStream(request, timeout=timeout_s, metadata=_metadata(request_id))
        return Stream(call, EventMerger(request_id, prompt), self.target)

    def chat(
        self,
        conversation: Sequence[Message] | str,
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions = _NO_OPTIONS,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> RequestOutput:
        """Answers a conversation, [{"role": "user", "content": "..."}, ...], or a single user turn."""
        request = messages.chat_request(conversation, sampling_params, options)
        with typed_errors(self.target, GATEWAY):
            response = self._stub.Chat(request, timeout=timeout_s, metadata=_metadata(request_id))
        return messages.merged(response, None)

    def chat_stream(
        self,
        conversation: Sequence[Message] | str,
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions = _NO_OPTIONS,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> Stream:
        """`chat` as a stream."""
        request = messages.chat_request(conversation, sampling_params, options)
        call = self._stub.ChatStream(request, timeout=timeout_s, metadata=_metadata(request_id))
        return Stream(call, EventMerger(request_id, None), self.target)

    def embed(
        self,
        prompts: Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        options: RequestOptions = _NO_OPTIONS,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Vectors of texts or token ids, in their order."""
        request = messages.embed_request(prompts, pooling_params, options)
        with typed_errors(self.target, GATEWAY):
            response = self._stub.Embed(request, timeout=timeout_s, metadata=_metadata(request_id))
        return messages.embedded(response, prompts, request_id)

    def cancel(self, request_id: str) -> None:
        """Ends a request, whoever runs it; an unknown or finished id is not an error."""
        with typed_errors(self.target, GATEWAY):
            self._stub.Cancel(pb.CancelRequest(request_id=request_id), timeout=_CONTROL_TIMEOUT_S)

    def tokenize(self, text: str, model: str = "") -> list[int]:
        """Token ids, those special ones included that the tokenizer adds by itself."""
        with typed_errors(self.target, GATEWAY):
            request = pb.TokenizeRequest(model=model, text=valid_text("text", text))
            return list(self._stub.Tokenize(request, timeout=_CONTROL_TIMEOUT_S).token_ids)

    def detokenize(self, token_ids: Sequence[int], model: str = "") -> str:
        """Text of token ids; special tokens are left out."""
        with typed_errors(self.target, GATEWAY):
            request = pb.DetokenizeRequest(model=model, token_ids=valid_ids("token_ids", token_ids))
            return str(self._stub.Detokenize(request, timeout=_CONTROL_TIMEOUT_S).text)

    def models(self) -> list[ModelCard]:
        """The models served."""
        with typed_errors(self.target, GATEWAY):
            response = self._stub.ListModels(pb.ListModelsRequest(), timeout=_CONTROL_TIMEOUT_S)
        return [messages.model_card(model) for model in response.models]


class AsyncClient:
    """`Client` for asyncio; belongs to the event loop it is made in."""

    def __init__(self, target: str = "127.0.0.1:50051") -> None:
        self.target = target
        self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel; running streams end."""
        await self._channel.close(None)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions = _NO_OPTIONS,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> RequestOutput:
        """See Client.generate."""
        request = messages.generate_request(prompt, sampling_params, options)
        with typed_errors(self.target, GATEWAY):
            response = await self._stub.Generate(request, timeout=timeout_s, metadata=_metadata(request_id))
        return messages.merged(response, prompt)

    def generate_stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions = _NO_OPTIONS,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> AsyncStream:
        """See Client.generate_stream."""
        request = messages.generate_request(prompt, sampling_params, options)
        call = self._stub.GenerateStream(request, timeout=timeout_s, metadata=_metadata(request_id))
        return AsyncStream(call, EventMerger(request_id, prompt), self.target)

    async def chat(
        self,
        conversation: Sequence[Message] | str,
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions = _NO_OPTIONS,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> RequestOutput:
        """See Client.chat."""
        request = messages.chat_request(conversation, sampling_params, options)
        with typed_errors(self.target, GATEWAY):
            response = await self._stub.Chat(request, timeout=timeout_s, metadata=_metadata(request_id))
        return messages.merged(response, None)

    def chat_stream(
        self,
        conversation: Sequence[Message] | str,
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions = _NO_OPTIONS,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> AsyncStream:
        """See Client.chat_stream."""
        request = messages.chat_request(conversation, sampling_params, options)
        call = self._stub.ChatStream(request, timeout=timeout_s, metadata=_metadata(request_id))
        return AsyncStream(call, EventMerger(request_id, None), self.target)

    async def embed(
        self,
        prompts: Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        options: RequestOptions = _NO_OPTIONS,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """See Client.embed."""
        request = messages.embed_request(prompts, pooling_params, options)
        with typed_errors(self.target, GATEWAY):
            response = await self._stub.Embed(request, timeout=timeout_s, metadata=_metadata(request_id))
        return messages.embedded(response, prompts, request_id)

    async def cancel(self, request_id: str) -> None:
        """See Client.cancel."""
        with typed_errors(self.target, GATEWAY):
            await self._stub.Cancel(pb.CancelRequest(request_id=request_id), timeout=_CONTROL_TIMEOUT_S)

    async def tokenize(self, text: str, model: str = "") -> list[int]:
        """See Client.tokenize."""
        with typed_errors(self.target, GATEWAY):
            request = pb.TokenizeRequest(model=model, text=valid_text("text", text))
            return list((await self._stub.Tokenize(request, timeout=_CONTROL_TIMEOUT_S)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], model: str = "") -> str:
        """See Client.detokenize."""
        with typed_errors(self.target, GATEWAY):
            request = pb.DetokenizeRequest(model=model, token_ids=valid_ids("token_ids", token_ids))
            return str((await self._stub.Detokenize(request, timeout=_CONTROL_TIMEOUT_S)).text)

    async def models(self) -> list[ModelCard]:
        """See Client.models."""
        with typed_errors(self.target, GATEWAY):
            response = await self._stub.ListModels(pb.ListModelsRequest(), timeout=_CONTROL_TIMEOUT_S)
        return [messages.model_card(model) for model in response.models]


__all__ = ["AsyncClient", "AsyncStream", "Client", "RequestOptions", "Stream"]
