"""Random chats through a router, several at once: each ends in the answer that a cell gives by itself, or is counted."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx

from tests.support.routers.smg import FORCED, delta

AT_ONCE = 24
# Of a hundred requests.
SHARES = {"whole": 55, "stream": 25, "tool call": 10, "left": 10}
_TOPICS = ("the sea", "a garden", "old maps", "trains", "bread", "stars", "rivers", "paper", "clocks", "birds")


def prompts(rng: random.Random) -> list[str]:
    """Texts of which several begin with the same 400 characters."""
    beginnings = [" ".join(f"{rng.choice(_TOPICS)} {rng.randrange(1000)};" for _ in range(30)) for _ in range(20)]
    return [f"{beginning} What of {topic}?" for beginning in beginnings for topic in rng.sample(_TOPICS, 5)]


def wish(prompt: str, **more: Any) -> dict[str, Any]:
    """A chat's body."""
    messages = [{"role": "user", "content": prompt}]
    return {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0, **more}


class RouterLoad:
    """Sends requests to `url`, `at_once` at a time. `expected`: the answer by prompt.

    `ended` counts by kind and outcome, `errors` has texts, `first_s` the seconds from each stream's request to its first text.
    """

    def __init__(self, url: str, expected: Mapping[str, str], rng: random.Random, *, at_once: int = AT_ONCE) -> None:
        self._expected = expected
        self._rng = rng
        self._client = httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None))
        self.ended: Counter[tuple[str, str]] = Counter()
        self.errors: list[str] = []
        self.first_s: list[float] = []
        self._at_once = at_once

    async def run(self, count: int) -> None:
        """Send so many."""
        kinds = iter(self._rng.choices(list(SHARES), list(SHARES.values()), k=count))

        async def some() -> None:
            for kind in kinds:
                await self._send(kind, self._rng.choice(list(self._expected)))

        await asyncio.gather(*(some() for _ in range(self._at_once)))

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    @property
    def num_failed(self) -> int:
        """Requests that did not end as they should."""
        return sum(count for (_, outcome), count in self.ended.items() if outcome != "right")

    async def _send(self, kind: str, prompt: str) -> None:
        try:
            right = await {"whole": self._whole, "stream": self._stream, "tool call": self._call, "left": self._left}[
                kind
            ](prompt)
        except (httpx.HTTPError, ValueError, LookupError) as error:
            self.ended[kind, "error"] += 1
            self.errors.append(f"{kind}: {type(error).__name__}: {str(error)[:200]}")
        else:
            self.ended[kind, "right" if right else "wrong"] += 1

    async def _whole(self, prompt: str) -> bool:
        message = await self._message(wish(prompt))
        return bool(message["content"] == self._expected[prompt])

    async def _call(self, prompt: str) -> bool:
        message = await self._message(wish(prompt, **FORCED) | {"max_tokens": 200})
        [made] = message["tool_calls"]
        return made["function"]["name"] == "weather" and json.loads(made["function"]["arguments"]) == {"city": "Oslo"}

    async def _message(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._client.post("/v1/chat/completions", json=body)
        if not answer.is_success:
            raise ValueError(f"{answer.status_code} {answer.text}")
        return dict(answer.json()["choices"][0]["message"])

    async def _stream(self, prompt: str) -> bool:
        began_s, texts = time.monotonic(), list[str]()
        async for text in self._texts(wish(prompt)):
            if text and not any(texts):
                self.first_s.append(time.monotonic() - began_s)
            texts.append(text)
        return "".join(texts) == self._expected[prompt]

    async def _left(self, prompt: str) -> bool:
        """A client that leaves in the middle of a long answer."""
        wanted = self._rng.randrange(1, 6)
        texts = self._texts(wish(prompt, ignore_eos=True) | {"max_tokens": 300})
        async for text in texts:
            wanted -= bool(text)
            if wanted == 0:
                break
        await texts.aclose()
        return wanted == 0

    async def _texts(self, body: dict[str, Any]) -> Any:
        async with self._client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
            if not answer.is_success:
                raise ValueError(f"{answer.status_code} {(await answer.aread()).decode()}")
            async for line in answer.aiter_lines():
                if line:
                    yield delta(line)
