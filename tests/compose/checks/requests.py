"""What the checks send: streams whose tokens must be the same every time."""

import threading
from dataclasses import dataclass, field
from typing import Any

import httpx

from quire.client.sampling_params import SamplingParams
from quire.client.sync_client import Client
from tests.compose.stack import GRPC, PROMETHEUS, until
from tests.support.commands import Failure

PROMPTS = ("def main():", "import os\n", "class Block:", "for step in range(10):", "The scheduler", "x = [")
GREEDY = SamplingParams(max_tokens=1200, temperature=0.0, ignore_eos=True)


@dataclass
class Streams:
    """One stream for each prompt, all at once; `tokens` grows while they run."""

    client: Client
    tokens: list[list[int]] = field(default_factory=lambda: [[] for _ in PROMPTS])
    errors: list[Exception] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> "Streams":
        """Begins; returns itself."""
        self._threads = [threading.Thread(target=self._read, args=(number,)) for number in range(len(PROMPTS))]
        for thread in self._threads:
            thread.start()
        return self

    def _read(self, number: int) -> None:
        try:
            for delta in self.client.generate_stream(PROMPTS[number], GREEDY, timeout_s=90):
                self.tokens[number] += delta.token_ids
        except Exception as error:
            self.errors.append(error)

    def num_tokens(self) -> int:
        """Of all streams, so far."""
        return sum(map(len, self.tokens))

    def finish(self) -> list[list[int]]:
        """All tokens; raises what a stream raised."""
        for thread in self._threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        return self.tokens


def undisturbed(client: Client) -> list[list[int]]:
    """The tokens of an undisturbed run."""
    return Streams(client).start().finish()


def client() -> Client:
    """Of the gRPC door."""
    return Client(GRPC)


def get(url: str, **query: str) -> httpx.Response:
    """An answer with status 200."""
    response = httpx.get(url, params=query, timeout=10)
    response.raise_for_status()
    return response


def targets() -> list[dict[str, Any]]:
    """What Prometheus scrapes, and how that went."""
    return list(get(f"{PROMETHEUS}/api/v1/targets").json()["data"]["activeTargets"])


def wait_for_targets() -> None:
    """Until it reaches them all. `Failure` naming those that it does not."""
    try:
        until(lambda: targets() and all(target["health"] == "up" for target in targets()), "all up", timeout_s=45)
    except Failure:
        lost = [f"{target['scrapeUrl']}: {target['lastError']}" for target in targets() if target["health"] != "up"]
        raise Failure(f"Prometheus does not reach {'; '.join(lost)}") from None
