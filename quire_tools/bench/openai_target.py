"""Any OpenAI-compatible endpoint as a target of load.

Sends standard fields only, plus `ignore_eos` if wanted (an extension of vLLM and others).
"""

import json
import os
import ssl
from types import TracebackType
from typing import Any

import httpx

from quire.client.connections import Credentials
from quire_tools.bench.measure import Record
from quire_tools.bench.targets import Clock
from quire_tools.bench.workloads import PlannedRequest

_NO_CREDENTIALS = Credentials()


class OpenAITarget:
    """`/v1/completions` (or chat) at a base URL such as http://127.0.0.1:8000.

    The API key is that of `credentials`, or OPENAI_API_KEY.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        ignore_eos: bool,
        timeout_s: float,
        chat: bool = False,
        credentials: Credentials = _NO_CREDENTIALS,
    ) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        self.name = base
        self._model = model
        self._chat = chat
        self._ignore_eos = ignore_eos
        self._path = f"{base}/v1/{'chat/completions' if chat else 'completions'}"
        self._models = f"{base}/v1/models"
        key = os.environ.get("OPENAI_API_KEY", "")
        headers = dict(credentials.metadata()) or ({"authorization": f"Bearer {key}"} if key else {})
        self._http = httpx.AsyncClient(
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            headers=headers,
            verify=_verified(credentials),
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

    def _body(self, planned: PlannedRequest) -> dict[str, Any]:
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

    async def stream(self, planned: PlannedRequest, record: Record, clock: Clock) -> None:
        """Send one streaming POST; the number of output tokens comes from usage, or else from counting messages."""
        record.sent_s = clock()
        async with self._http.stream("POST", self._path, json=self._body(planned)) as reply:
            if reply.status_code != httpx.codes.OK:
                raise RuntimeError(f"HTTP {reply.status_code}: {_reason(await reply.aread())}")
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


def _verified(credentials: Credentials) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=credentials.tls_ca)
    if credentials.tls_cert is not None:
        context.load_cert_chain(credentials.tls_cert, credentials.tls_key)
    return context


def _says_something(choice: dict[str, Any]) -> bool:
    return bool(choice.get("text") or (choice.get("delta") or {}).get("content"))


def _reason(body: bytes) -> str:
    """Why the endpoint refused the request: its error code if it sends one, so that equal errors can be counted."""
    try:
        error = json.loads(body)["error"]
        return str(error.get("code") or error["message"])[:200]
    except (ValueError, KeyError, TypeError, AttributeError):
        return body[:200].decode(errors="replace")
