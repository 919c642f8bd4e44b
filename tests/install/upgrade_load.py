"""Clients of an installed Quire during an upgrade; needs nothing but that installation.

    python upgrade_load.py HOST:PORT,HOST:PORT      # two gateways: streams are resumable

Reads each prompt once, prints `ready`, then keeps one stream per prompt running, and prints `ended` for each that ended. A line on
standard input names the phase that begins. At the end of the input it lets the streams end and prints a JSON object.
"""

import json
import sys
import threading
import time
from collections import Counter

from quire import SamplingParams
from quire.client.sync_client import Client

FIXED = {"max_tokens": 300, "ignore_eos": True}
CASES = (
    ("class Node:", SamplingParams(temperature=0, **FIXED)),
    ("def main():", SamplingParams(temperature=0.8, seed=1, **FIXED)),
    ("import ", SamplingParams(temperature=1.0, top_p=0.9, seed=2, **FIXED)),
    ("x = [1, 2, 3]\n" * 20, SamplingParams(temperature=0.7, top_k=20, seed=3, **FIXED)),
)


class Load:
    """What the streams of all threads gave. `failed`: one line each; `pause_s`: longest wait for a token, by phase."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self.phase = "undisturbed"
        self.ended: Counter[str] = Counter()
        self.pause_s: dict[str, float] = {}
        self.failed: list[str] = []
        self.num_tokens = self.num_changed = 0
        self.stopping = threading.Event()
        self.expected = [self._tokens(number) for number in range(len(CASES))]

    def keep_reading(self, number: int) -> None:
        """Read the stream of one case again and again."""
        while not self.stopping.is_set():
            try:
                tokens = self._tokens(number)
            except Exception as error:
                self._note(f"{type(error).__name__} in phase {self.phase}: {error}")
            else:
                self._note("", len(tokens), changed=tokens != self.expected[number])

    def _tokens(self, number: int) -> list[int]:
        prompt, params = CASES[number]
        tokens: list[int] = []
        before_s = time.monotonic()
        for delta in self._client.generate_stream(prompt, params):
            tokens += delta.token_ids
            before_s = self._paused(before_s)
        return tokens

    def _paused(self, before_s: float) -> float:
        now_s = time.monotonic()
        with self._lock:
            self.pause_s[self.phase] = max(self.pause_s.get(self.phase, 0.0), now_s - before_s)
        return now_s

    def _note(self, failure: str, num_tokens: int = 0, *, changed: bool = False) -> None:
        with self._lock:
            self.failed += [failure] if failure else []
            self.ended[self.phase] += 1
            self.num_tokens += num_tokens
            self.num_changed += changed
            print("ended", flush=True)

    def report(self) -> str:
        """One line of JSON."""
        kept = {name: vars(self)[name] for name in ("ended", "pause_s", "failed", "num_tokens", "num_changed")}
        return json.dumps(kept)


def main() -> None:
    """The command."""
    with Client(sys.argv[1]) as client:
        load = Load(client)
        print("ready", flush=True)
        threads = [threading.Thread(target=load.keep_reading, args=(number,)) for number in range(len(CASES))]
        for thread in threads:
            thread.start()
        for line in sys.stdin:
            load.phase = line.strip()
        load.stopping.set()
        for thread in threads:
            thread.join()
        print(load.report(), flush=True)


if __name__ == "__main__":
    main()
