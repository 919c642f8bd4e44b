"""A server that speaks just enough of OpenAI's streaming API, with known delays, to check the load generator against."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass(slots=True)
class OpenAILike:
    """First token after `first_s`, each further one after `gap_s`; refuses every request once `refuse` is set."""

    first_s: float = 0.05
    gap_s: float = 0.01
    refuse: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [{"id": "like", "object": "model"}]})

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions and /v1/chat/completions."""
        body = await request.json()
        self.bodies.append(body)
        if self.refuse:
            return JSONResponse({"error": {"message": "queue full"}}, status_code=429)
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        for index in range(body["max_tokens"]):
            await asyncio.sleep(self.gap_s if index else self.first_s)
            choice = {"delta": {"content": "x "}} if "messages" in body else {"text": "x "}
            yield f"data: {json.dumps({'choices': [{'index': 0, **choice}]})}\n\n"
        details = {"cached_tokens": 3}
        usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"], "prompt_tokens_details": details}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

    @contextmanager
    def serving(self) -> Iterator["OpenAILike"]:
        """Serves on a free port in a thread of its own."""
        paths = ("/v1/completions", "/v1/chat/completions")
        routes = [Route("/v1/models", self.models), *(Route(path, self.complete, methods=["POST"]) for path in paths)]
        config = uvicorn.Config(Starlette(routes=routes), host="127.0.0.1", port=0, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        deadline = time.monotonic() + 10
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.005)
        assert server.started
        self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive()
