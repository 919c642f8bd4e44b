"""Requests of all kinds at a running stack for as long as a context lasts: long and short prompts, shared prefixes, n = 4."""

import contextlib
import random
import threading
from collections.abc import Iterator

import httpx

WORDS = ("def", "return", "x", "class", "import", "self", "for", "in", "range", "(n):")
_TIMEOUT_S = 280.0
LICENCE = "# the same lines at the top of every file of this house, so that their blocks are shared\n" * 3


def body(rng: random.Random, longest: int) -> dict[str, object]:
    """One request; prompts of up to `longest` words."""
    prompt = " ".join(rng.choice(WORDS) for _ in range(rng.randint(5, longest)))
    num_choices = rng.choice([1, 1, 4])
    return {
        "model": "tiny",
        "prompt": (LICENCE if rng.random() < 0.5 else "") + prompt,
        # What cannot fit the smallest pool in use, even alone, would be refused.
        "max_tokens": rng.randint(20, 120 if num_choices == 1 else 50),
        "n": num_choices,
        "temperature": 0.9,
        "seed": rng.randrange(2**31),
        "ignore_eos": True,
    }


@contextlib.contextmanager
def load(url: str, *, clients: int = 6, longest: int = 60) -> Iterator[None]:
    """So many clients, each with one request at a time, until the context ends."""
    stop = threading.Event()

    def work(number: int) -> None:
        rng = random.Random(number)
        with httpx.Client(base_url=url, timeout=_TIMEOUT_S, verify=False) as http:
            while not stop.is_set():
                http.post("/v1/completions", json=body(rng, longest)).raise_for_status()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
