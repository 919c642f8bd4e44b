"""The engine behind a gateway, with the same few methods as the one in this process (quire.in_process).

An event loop in a thread of its own reads the streams; `step()` hands over what came since the last one.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from quire.client import AsyncClient
from quire.messages import Prompt, RequestOptions
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from svc_common.errors import AlreadyExists, Cancelled, QuireError

MAX_OPEN_STREAMS = 512
_CLOSE_S = 5.0

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Running:
    """A request under way. Its output is filled on the loop's thread and handed over by `_news`."""

    output: RequestOutput
    task: Future[None] | None = None


class RemoteEngine:
    """Owner of one AsyncClient, its loop and thread. One thread calls the public methods."""

    def __init__(self, target: str, *, draw_seed: Callable[[], int], model: str = "") -> None:
        self._draw_seed = draw_seed
        self._model = model
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-remote", daemon=True)
        self._thread.start()
        self._slots = asyncio.Semaphore(MAX_OPEN_STREAMS)
        self._client = self._wait(self._connect(target))
        self._running: dict[str, _Running] = {}
        self._news: queue.SimpleQueue[_Running] = queue.SimpleQueue()

    def add(self, request_id: str, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> None:
        """Sends a request. AlreadyExists for a running id; what the gateway refuses comes as the output's `error`."""
        if request_id in self._running:
            raise AlreadyExists(f"request {request_id} is running already", reason="DUPLICATE_REQUEST")
        seeded = params if params.seed is not None else replace(params, seed=self._draw_seed())
        running = _Running(RequestOutput(request_id, prompt if isinstance(prompt, str) else None, None, []))
        work = self._stream(running, prompt, seeded, replace(options, model=options.model or self._model))
        self._running[request_id] = running
        running.task = asyncio.run_coroutine_threadsafe(work, self._loop)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests. Unknown and finished ids are ignored."""
        for request_id in request_ids:
            running = self._running.get(request_id)
            if running is not None and running.task is not None:
                running.task.cancel()

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to wait for."""
        return bool(self._running)

    def step(self) -> list[RequestOutput]:
        """Waits until a running request has something new and returns all that have; finished ones for the last time."""
        if not self._running:
            return []
        touched: dict[str, RequestOutput] = {}
        while not touched:
            news: _Running | None = self._news.get()
            while news is not None:
                self._hand_over(news, touched)
                news = self._take()
        return list(touched.values())

    def _hand_over(self, news: _Running, touched: dict[str, RequestOutput]) -> None:
        request_id = news.output.request_id
        if self._running.get(request_id) is not news:
            return  # told as finished before: the stream's thread was faster than this one
        touched[request_id] = news.output
        if news.output.finished:
            del self._running[request_id]

    def close(self) -> None:
        """Ends what runs and the thread."""
        if not self._loop.is_running():
            return
        self.abort(list(self._running))
        self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        self._loop.close()

    def _take(self) -> _Running | None:
        try:
            return self._news.get_nowait()
        except queue.Empty:
            return None

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @staticmethod
    async def _connect(target: str) -> AsyncClient:
        return AsyncClient(target)

    async def _stream(self, running: _Running, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> None:
        request_id, text = running.output.request_id, running.output.prompt
        try:
            async with self._slots:
                ids = (
                    list(prompt) if not isinstance(prompt, str) else await self._client.tokenize(prompt, options.model)
                )
                stream = self._client.generate_stream(ids, params, options=options, request_id=request_id)
                running.output = stream.result
                running.output.prompt = text
                async for _ in stream:
                    self._news.put(running)
        except (asyncio.CancelledError, Cancelled):
            _end_aborted(running.output)
        except QuireError as error:
            running.output.error, running.output.finished = error, True
        self._news.put(running)


def _end_aborted(output: RequestOutput) -> None:
    for completion in output.outputs:
        completion.finish_reason = completion.finish_reason or "abort"
    output.finished = True
