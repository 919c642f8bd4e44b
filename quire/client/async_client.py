"""`AsyncClient`: the asyncio version of `Client` in quire.client.sync_client."""

import asyncio
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from protos.inference.v1 import inference_pb2 as pb
from quire.client import messages
from quire.client.call_plan import CallPlan
from quire.client.calls import GATEWAY, typed_errors
from quire.client.chat_messages import ChatOptions, Message
from quire.client.connections import Credentials, Gateways, asyncio_channel
from quire.client.messages import EventMerger, Prompt, RequestOptions
from quire.client.outputs import EmbeddingRequestOutput, ModelCard, RequestOutput
from quire.client.retrying import RetryPolicy
from quire.client.sampling_params import PoolingParams, SamplingParams
from quire.client.streams import AsyncStream
from quire.client.value_checks import valid_ids, valid_text
from svc_common.errors import QuireError

_NO_OPTIONS = RequestOptions()
_NO_CHAT = ChatOptions()
_CONTROL_TIMEOUT_S = 30.0
_NO_CREDENTIALS = Credentials()
_RETRIES = RetryPolicy()


class AsyncClient:
    """`Client` for asyncio; bound to the event loop in which it is created."""

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        credentials: Credentials = _NO_CREDENTIALS,
        retries: RetryPolicy = _RETRIES,
    ) -> None:
        self._gateways = Gateways(target, asyncio_channel(credentials))
        self._plan = CallPlan(self._gateways, credentials, retries)
        self._cancels: set[Any] = set()
        self._streams: weakref.WeakSet[AsyncStream] = weakref.WeakSet()

    @property
    def target(self) -> str:
        """Address of the gateway in use."""
        return self._gateways.target

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel running streams and close the channels."""
        for stream in list(self._streams):
            stream.cancel()
        await asyncio.gather(*self._cancels, return_exceptions=True)
        for channel in self._gateways.channels():
            await channel.close(None)

    # --- generation --------------------------------------------------------------------------------------------------

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
        return messages.merged(await self._call("Generate", request, request_id, timeout_s), prompt)

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
        return self._stream("GenerateStream", request, request_id, timeout_s, prompt)

    async def chat(
        self,
        conversation: Sequence[Message] | str,
        sampling_params: SamplingParams | None = None,
        *,
        chat: ChatOptions = _NO_CHAT,
        options: RequestOptions = _NO_OPTIONS,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> RequestOutput:
        """See Client.chat."""
        request = messages.chat_request(conversation, sampling_params, options, chat)
        return messages.merged(await self._call("Chat", request, request_id, timeout_s), None)

    def chat_stream(
        self,
        conversation: Sequence[Message] | str,
        sampling_params: SamplingParams | None = None,
        *,
        chat: ChatOptions = _NO_CHAT,
        options: RequestOptions = _NO_OPTIONS,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> AsyncStream:
        """See Client.chat_stream."""
        request = messages.chat_request(conversation, sampling_params, options, chat)
        return self._stream("ChatStream", request, request_id, timeout_s, None)

    def resume(
        self, request_id: str, *, positions: Sequence[tuple[int, int]] = (), timeout_s: float | None = None
    ) -> AsyncStream:
        """See Client.resume."""
        request = messages.resume_request(request_id, positions)
        return self._stream("Resume", request, "", timeout_s, None)

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
        return messages.embedded(await self._call("Embed", request, request_id, timeout_s), prompts, request_id)

    async def cancel(self, request_id: str) -> None:
        """See Client.cancel."""
        await self._call("Cancel", pb.CancelRequest(request_id=request_id), "", _CONTROL_TIMEOUT_S)

    # --- text and models ---------------------------------------------------------------------------------------------

    async def tokenize(self, text: str, model: str = "") -> list[int]:
        """See Client.tokenize."""
        request = pb.TokenizeRequest(model=model, text=valid_text("text", text))
        return list((await self._call("Tokenize", request, "", _CONTROL_TIMEOUT_S)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], model: str = "") -> str:
        """See Client.detokenize."""
        request = pb.DetokenizeRequest(model=model, token_ids=valid_ids("token_ids", token_ids))
        return str((await self._call("Detokenize", request, "", _CONTROL_TIMEOUT_S)).text)

    async def count_tokens(
        self,
        prompt: Prompt | Sequence[Message],
        *,
        chat: ChatOptions | None = None,
        options: RequestOptions = _NO_OPTIONS,
    ) -> int:
        """See Client.count_tokens."""
        request = messages.count_request(prompt, options, chat)
        return int((await self._call("CountTokens", request, "", _CONTROL_TIMEOUT_S)).prompt_tokens)

    async def models(self) -> list[ModelCard]:
        """See Client.models."""
        response = await self._call("ListModels", pb.ListModelsRequest(), "", _CONTROL_TIMEOUT_S)
        return [messages.model_card(model) for model in response.models]

    # --- calls -------------------------------------------------------------------------------------------------------

    async def _call(self, method: str, request: Any, request_id: str, timeout_s: float | None) -> Any:
        opening = self._plan.opening(method, request, request_id, timeout_s, cancel=self._send_cancel)
        try:
            while True:
                try:
                    with typed_errors(opening.attempts.begin(), GATEWAY):
                        return await opening.call()
                except QuireError as error:
                    pause_s = opening.attempts.pause_s(error)
                    if pause_s is None:
                        raise
                await asyncio.sleep(pause_s)
        except asyncio.CancelledError:
            opening.abandon()
            raise

    def _stream(
        self, method: str, request: Any, request_id: str, timeout_s: float | None, prompt: Prompt | None
    ) -> AsyncStream:
        opening = self._plan.opening(method, request, request_id, timeout_s, cancel=self._send_cancel)
        stream = AsyncStream(opening, EventMerger(request_id, prompt))
        self._streams.add(stream)
        return stream

    def _send_cancel(self, stub: Any, request: pb.CancelRequest, timeout_s: float, metadata: Any) -> None:
        call = asyncio.ensure_future(_ended(stub.Cancel(request, timeout=timeout_s, metadata=metadata)))
        self._cancels.add(call)
        call.add_done_callback(self._cancels.discard)


async def _ended(call: Any) -> None:
    """Wait for `call` and ignore its errors; an unreachable gateway does not matter to a cancellation."""
    await asyncio.gather(call, return_exceptions=True)
