"""Clients of the servers: each wire sends one request and timestamps its record as tokens arrive.

All send prompts as token ids and request greedy tokens, exactly as many as planned.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from benchmarks.compare import sse
from quire.client.async_client import AsyncClient
from quire.client.sampling_params import SamplingParams
from quire_tools.bench.measure import Record
from quire_tools.bench.workloads import PlannedRequest

Clock = Callable[[], float]
_LIMIT_S = 600.0


class Wire(Protocol):
    """A client, bound to the event loop it is made in."""

    async def ask(self, planned: PlannedRequest, record: Record, clock: Clock) -> list[int]:
        """Send a request and fill `record`. Returns the tokens if the wire carries them (else none); raises any error."""

    async def close(self) -> None:
        """Close connections."""


class GrpcWire:
    """Quire's own client at HOST:PORT."""

    def __init__(self, address: str) -> None:
        self._client = AsyncClient(address)

    async def ask(self, planned: PlannedRequest, record: Record, clock: Clock) -> list[int]:
        """See Wire."""
        params = SamplingParams(temperature=0.0, max_tokens=planned.max_tokens, ignore_eos=True)
        stream = self._client.generate_stream(planned.token_ids, params, timeout_s=_LIMIT_S)
        async for delta in stream:
            if delta.token_ids:
                record.token_times_s.append(clock())
                record.output_tokens += len(delta.token_ids)
        record.cached_tokens = stream.result.num_cached_tokens or 0
        return stream.result.outputs[0].token_ids

    async def close(self) -> None:
        """See Wire."""
        await self._client.close()


class OpenAIWire:
    """`/v1/completions` at HOST:PORT. `more`: further fields of each request."""

    def __init__(self, host: str, port: int, model: str, more: Mapping[str, Any]) -> None:
        self._host, self._port = host, port
        self._common = {
            "model": model,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            **more,
        }

    async def ask(self, planned: PlannedRequest, record: Record, clock: Clock) -> list[int]:
        """See Wire. Returns tokens if the server sends `token_ids`."""
        body = {**self._common, "prompt": planned.token_ids, "max_tokens": planned.max_tokens}
        tokens: list[int] = []
        async with aclosing(sse.post(self._host, self._port, "/v1/completions", json.dumps(body).encode())) as events:
            async for payload in events:
                now, event = clock(), json.loads(payload)
                for choice in event.get("choices") or ():
                    if choice.get("token_ids") or choice.get("text"):
                        record.token_times_s.append(now)
                        tokens += choice.get("token_ids") or ()
                record.output_tokens = (event.get("usage") or {}).get("completion_tokens", record.output_tokens)
        return tokens

    async def close(self) -> None:
        """No-op: no connection is kept open."""


class LlamaCppWire:
    """`/completion` of llama-server at HOST:PORT.

    Its samplers are reduced to the one that greedy tokens need: the default ones scan the vocabulary for
    nothing. A token that ends within a character has no message of its own, and its id is lost.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    async def ask(self, planned: PlannedRequest, record: Record, clock: Clock) -> list[int]:
        """See Wire. Returns no tokens if one was lost."""
        body = {
            "prompt": planned.token_ids,
            "n_predict": planned.max_tokens,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": True,
            "return_tokens": True,
            "stream": True,
        }
        tokens: list[int] = []
        async with aclosing(sse.post(self._host, self._port, "/completion", json.dumps(body).encode())) as events:
            async for payload in events:
                now, event = clock(), json.loads(payload)
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                if event.get("stop"):
                    record.output_tokens = event["tokens_predicted"]
                elif event.get("tokens"):
                    record.token_times_s.append(now)
                    tokens += event["tokens"]
        return tokens if len(tokens) == record.output_tokens else []

    async def close(self) -> None:
        """No-op: no connection is kept open."""
