"""Clients of a gateway's gRPC API: `Client` blocks; `AsyncClient` (quire.client.async_client) is the asyncio version.

    with Client("127.0.0.1:50051") as client:
        print(client.generate("def main():", SamplingParams(max_tokens=40)).text)
        for delta in client.generate_stream("import "):
            print(delta.text, end="")

Errors are those of svc_common.errors (`InvalidArgument`, `ResourceExhausted`, ...). Temporary refusals are
retried after the time that the server gives (`retries`). With several addresses, "a:50051,b:50051", calls
and streams continue at the next gateway if one is lost. The current OpenTelemetry context is sent along.
Not here: message conversion (quire.client.messages) and retry decisions (quire.client.retrying).
"""

import contextlib
import time
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from protos.inference.v1 import inference_pb2 as pb
from quire.client import messages
from quire.client.async_client import AsyncClient
from quire.client.call_plan import CallPlan
from quire.client.calls import GATEWAY, typed_errors
from quire.client.chat_messages import ChatOptions, Message
from quire.client.connections import Credentials, Gateways, blocking_channel
from quire.client.messages import EventMerger, Prompt, RequestOptions
from quire.client.outputs import EmbeddingRequestOutput, ModelCard, RequestOutput
from quire.client.retrying import RetryPolicy
from quire.client.sampling_params import PoolingParams, SamplingParams
from quire.client.streams import AsyncStream, Stream
from quire.client.value_checks import valid_ids, valid_text
from svc_common.errors import QuireError

_NO_OPTIONS = RequestOptions()
_NO_CHAT = ChatOptions()
_CONTROL_TIMEOUT_S = 30.0
_NO_CREDENTIALS = Credentials()
_RETRIES = RetryPolicy()


class Client:
    """Blocking, thread-safe client. `timeout_s` of a call is its deadline, retries included (None = none).

    `target`: HOST:PORT, or several separated by commas. `retries`: NO_RETRIES for none.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        credentials: Credentials = _NO_CREDENTIALS,
        retries: RetryPolicy = _RETRIES,
    ) -> None:
        self._gateways = Gateways(target, blocking_channel(credentials))
        self._plan = CallPlan(self._gateways, credentials, retries)
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()

    @property
    def target(self) -> str:
        """Address of the gateway in use."""
        return self._gateways.target

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Cancel running streams and close the channels."""
        for stream in list(self._streams):
            stream.cancel()
        for channel in self._gateways.channels():
            channel.close()

    # --- generation --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions = _NO_OPTIONS,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> RequestOutput:
        """Complete text or token ids; without parameters the server's defaults apply (up to the model's context)."""
        request = messages.generate_request(prompt, sampling_params, options)
        return messages.merged(self._call("Generate", request, request_id, timeout_s), prompt)

    def generate_stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions = _NO_OPTIONS,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> Stream:
        """Complete text or token ids as a stream; iterate over it for deltas."""
        request = messages.generate_request(prompt, sampling_params, options)
        return self._stream("GenerateStream", request, request_id, timeout_s, prompt)

    def chat(
        self,
        conversation: Sequence[Message] | str,
        sampling_params: SamplingParams | None = None,
        *,
        chat: ChatOptions = _NO_CHAT,
        options: RequestOptions = _NO_OPTIONS,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> RequestOutput:
        """Answer a conversation, [{"role": "user", "content": "..."}, ...], or a single user turn. `chat`:
        tools and other chat options."""
        request = messages.chat_request(conversation, sampling_params, options, chat)
        return messages.merged(self._call("Chat", request, request_id, timeout_s), None)

    def chat_stream(
        self,
        conversation: Sequence[Message] | str,
        sampling_params: SamplingParams | None = None,
        *,
        chat: ChatOptions = _NO_CHAT,
        options: RequestOptions = _NO_OPTIONS,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> Stream:
        """`chat` as a stream."""
        request = messages.chat_request(conversation, sampling_params, options, chat)
        return self._stream("ChatStream", request, request_id, timeout_s, None)

    def resume(
        self, request_id: str, *, positions: Sequence[tuple[int, int]] = (), timeout_s: float | None = None
    ) -> Stream:
        """Resume a resumable request.

        `positions`: (choice, number of its tokens already received); none = from the beginning. Raises
        NotFound (RESUME_EXPIRED) if the request is no longer held. The stream's result has only the output
        from there on.
        """
        request = messages.resume_request(request_id, positions)
        return self._stream("Resume", request, "", timeout_s, None)

    def embed(
        self,
        prompts: Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        options: RequestOptions = _NO_OPTIONS,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embed texts or token ids; returns the vectors in the order of the prompts."""
        request = messages.embed_request(prompts, pooling_params, options)
        return messages.embedded(self._call("Embed", request, request_id, timeout_s), prompts, request_id)

    def cancel(self, request_id: str) -> None:
        """End a request on any worker; an unknown or finished id is not an error."""
        self._call("Cancel", pb.CancelRequest(request_id=request_id), "", _CONTROL_TIMEOUT_S)

    # --- text and models ---------------------------------------------------------------------------------------------

    def tokenize(self, text: str, model: str = "") -> list[int]:
        """Token ids of `text`, including the special ones that the tokenizer adds."""
        request = pb.TokenizeRequest(model=model, text=valid_text("text", text))
        return list(self._call("Tokenize", request, "", _CONTROL_TIMEOUT_S).token_ids)

    def detokenize(self, token_ids: Sequence[int], model: str = "") -> str:
        """Text of token ids, without special tokens."""
        request = pb.DetokenizeRequest(model=model, token_ids=valid_ids("token_ids", token_ids))
        return str(self._call("Detokenize", request, "", _CONTROL_TIMEOUT_S).text)

    def count_tokens(
        self,
        prompt: Prompt | Sequence[Message],
        *,
        chat: ChatOptions | None = None,
        options: RequestOptions = _NO_OPTIONS,
    ) -> int:
        """Number of tokens of a prompt; of a conversation (a list of turns, or any prompt with `chat`)
        including template and tools."""
        request = messages.count_request(prompt, options, chat)
        return int(self._call("CountTokens", request, "", _CONTROL_TIMEOUT_S).prompt_tokens)

    def models(self) -> list[ModelCard]:
        """The models served."""
        response = self._call("ListModels", pb.ListModelsRequest(), "", _CONTROL_TIMEOUT_S)
        return [messages.model_card(model) for model in response.models]

    # --- calls -------------------------------------------------------------------------------------------------------

    def _call(self, method: str, request: Any, request_id: str, timeout_s: float | None) -> Any:
        opening = self._plan.opening(method, request, request_id, timeout_s, cancel=_send_cancel)
        try:
            while True:
                try:
                    with typed_errors(opening.attempts.begin(), GATEWAY):
                        return opening.call()
                except QuireError as error:
                    pause_s = opening.attempts.pause_s(error)
                    if pause_s is None:
                        raise
                time.sleep(pause_s)
        except KeyboardInterrupt:
            opening.interrupted()
            opening.abandon()
            raise

    def _stream(
        self, method: str, request: Any, request_id: str, timeout_s: float | None, prompt: Prompt | None
    ) -> Stream:
        opening = self._plan.opening(method, request, request_id, timeout_s, cancel=_send_cancel)
        stream = Stream(opening, EventMerger(request_id, prompt))
        self._streams.add(stream)
        return stream


def _send_cancel(stub: Any, request: pb.CancelRequest, timeout_s: float, metadata: Any) -> None:
    """Send a Cancel and wait for it, since closing the channel would drop it; errors are ignored."""
    with contextlib.suppress(grpc.RpcError):
        stub.Cancel(request, timeout=timeout_s, metadata=metadata)


__all__ = [
    "AsyncClient",
    "AsyncStream",
    "ChatOptions",
    "Client",
    "Credentials",
    "RequestOptions",
    "RetryPolicy",
    "Stream",
]
