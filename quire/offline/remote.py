"""The engine behind a gateway, with the methods of the one in this process (quire.offline.in_process).

An event loop in its own thread reads the streams; `step()` returns what arrived since the last call.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from quire.client.conversations import Conversation
from quire.client.messages import Prompt, RequestOptions
from quire.client.outputs import RequestOutput
from quire.client.sampling_params import AnyParams, PoolingParams, SamplingParams
from quire.client.streams import AsyncStream
from quire.client.sync_client import AsyncClient
from svc_common.errors import AlreadyExists, Cancelled, FailedPrecondition, Internal, QuireError

MAX_OPEN_STREAMS = 512
_CLOSE_S = 5.0

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Running:
    """A running request; accessed on the loop's thread only."""

    output: RequestOutput
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class _News:
    """A request and a copy of its output at the time of an update."""

    running: _Running
    output: RequestOutput


class RemoteEngine:
    """Owns one AsyncClient with its event loop and thread. The public methods must be called from one thread."""

    def __init__(self, target: str, *, draw_seed: Callable[[], int], model: str = "") -> None:
        self._draw_seed = draw_seed
        self._model = model
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-remote", daemon=True)
        self._thread.start()
        self._slots = asyncio.Semaphore(MAX_OPEN_STREAMS)
        self._client = self._wait(self._connect(target))
        self._running: dict[str, _Running] = {}
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()

    def add(self, request_id: str, prompt: Prompt | Conversation, params: AnyParams, options: RequestOptions) -> None:
        """Send a request. Raises AlreadyExists for a running id; a refusal by the gateway arrives as the output's `error`."""
        if request_id in self._running:
            raise AlreadyExists(f"request {request_id} is running already", reason="DUPLICATE_REQUEST")
        running = _Running(RequestOutput(request_id, prompt if isinstance(prompt, str) else None, None, []))
        options = replace(options, model=options.model or self._model)
        if isinstance(params, PoolingParams):
            assert not isinstance(prompt, Conversation), "LLM.chat takes SamplingParams alone"
            work = self._embed(running, prompt, params, options)
        else:
            seeded = params if params.seed is not None else replace(params, seed=self._draw_seed())
            work = self._stream(running, prompt, seeded, options)
        self._running[request_id] = running
        self._loop.call_soon_threadsafe(self._start, running, work)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests. Unknown and finished ids are ignored."""
        for request_id in request_ids:
            running = self._running.get(request_id)
            if running is not None:
                self._loop.call_soon_threadsafe(_cancel, running)

    def discard(self, request_ids: Iterable[str]) -> None:
        """End requests without reporting them from `step`."""
        for request_id in request_ids:
            running = self._running.pop(request_id, None)
            if running is not None:
                self._loop.call_soon_threadsafe(_cancel, running)

    def has_unfinished(self) -> bool:
        """True if `step` has anything to wait for."""
        return bool(self._running)

    def step(self) -> list[RequestOutput]:
        """Wait until a running request has new output; return all that have, finished ones for the last time."""
        if not self._running:
            return []
        touched: dict[str, RequestOutput] = {}
        while not touched:
            news: _News | None = self._news.get()
            while news is not None:
                self._hand_over(news, touched)
                news = self._take()
        return list(touched.values())

    def _hand_over(self, news: _News, touched: dict[str, RequestOutput]) -> None:
        request_id = news.output.request_id
        if self._running.get(request_id) is not news.running:
            return  # update of a request already reported as finished
        touched[request_id] = news.output
        if news.output.finished:
            del self._running[request_id]

    def steps(self, *, tables: bool) -> list[dict[str, Any]]:
        """Raise FailedPrecondition: the steps are kept by the scheduler."""
        raise FailedPrecondition(
            "the steps are the scheduler's: ask the admin API, or `quire steps`", reason="STEPS_NOT_KEPT"
        )

    def close(self) -> None:
        """End all requests and the thread."""
        if not self._loop.is_running():
            return
        self.abort(list(self._running))
        self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        self._loop.close()

    def _take(self) -> _News | None:
        try:
            return self._news.get_nowait()
        except queue.Empty:
            return None

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @staticmethod
    async def _connect(target: str) -> AsyncClient:
        return AsyncClient(target)

    # --- on the loop's thread ------------------------------------------------------------------------------------

    def _start(self, running: _Running, work: Coroutine[Any, Any, None]) -> None:
        running.task = self._loop.create_task(work)
        running.task.add_done_callback(lambda task: self._end(running, task))

    async def _stream(
        self, running: _Running, prompt: Prompt | Conversation, params: SamplingParams, options: RequestOptions
    ) -> None:
        async with self._slots:
            stream = await self._open(running.output.request_id, prompt, params, options)
            running.output = stream.result
            running.output.prompt = prompt if isinstance(prompt, str) else None
            async for _ in stream:
                self._tell(running)

    async def _open(
        self, request_id: str, prompt: Prompt | Conversation, params: SamplingParams, options: RequestOptions
    ) -> AsyncStream:
        if isinstance(prompt, Conversation):
            return self._client.chat_stream(
                prompt.messages, params, chat=prompt.chat, options=options, request_id=request_id
            )
        ids = await self._token_ids(prompt, options)
        return self._client.generate_stream(ids, params, options=options, request_id=request_id)

    async def _embed(self, running: _Running, prompt: Prompt, params: PoolingParams, options: RequestOptions) -> None:
        output = running.output
        async with self._slots:
            ids = output.prompt_token_ids = await self._token_ids(prompt, options)
            (embedded,) = await self._client.embed([ids], params, options=options, request_id=output.request_id)
            output.embedding = embedded.outputs.embedding
            output.num_prompt_tokens = embedded.num_prompt_tokens

    async def _token_ids(self, prompt: Prompt, options: RequestOptions) -> list[int]:
        if isinstance(prompt, str):
            return await self._client.tokenize(prompt, options.model)
        return [int(i) for i in prompt]

    def _end(self, running: _Running, task: asyncio.Task[None]) -> None:
        """Report the request as finished, exactly once, however it ended."""
        error = Cancelled("aborted") if task.cancelled() else task.exception()
        output = running.output
        if isinstance(error, Cancelled):
            for completion in output.outputs:
                completion.finish_reason = completion.finish_reason or "abort"
        elif error is not None:
            output.error = error if isinstance(error, QuireError) else Internal(repr(error))
        output.finished = True
        self._tell(running)

    def _tell(self, running: _Running) -> None:
        if running.output.finished and running.task is not None and not running.task.done():
            return  # `_end` reports it
        self._news.put(_News(running, _snapshot(running.output)))


def _cancel(running: _Running) -> None:
    if running.task is not None:
        running.task.cancel()


def _snapshot(output: RequestOutput) -> RequestOutput:
    """A copy that the program's thread may keep while the stream continues."""
    copies = [
        replace(
            c,
            token_ids=list(c.token_ids),
            logprobs=None if c.logprobs is None else list(c.logprobs),
            tool_calls=[replace(call) for call in c.tool_calls],
        )
        for c in output.outputs
    ]
    return replace(output, outputs=copies)
