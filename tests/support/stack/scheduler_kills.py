"""The scheduler of a running stack is killed again and again while requests of all kinds go on; for tests and the soak."""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quire import SamplingParams
from quire.client.sync_client import Client
from tests.support.stack import kill_requests
from tests.support.stack.commands import blocks
from tests.support.stack.sizes import SMALL_STEP
from tests.support.stack.supervised import Case, Readings, Supervised

_ENDS = {"temperature": 0.8, "seed": 9, "max_tokens": 90}
WORKER_ARGS = ("--dtype", "float32", "--max-model-len", "256", "--num-gpu-blocks-override", "200")
OPTIONS: dict[str, object] = {"worker_args": WORKER_ARGS, "max_num_batched_tokens": SMALL_STEP}
"""Of a stack for this."""


@dataclass(frozen=True, slots=True)
class Survived:
    """What went on meanwhile. `seconds`: from the first kill to the last request's end."""

    kills: int
    requests: int
    tokens: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"kills of the scheduler, models/tiny: {self.kills} in {self.seconds:.0f} s; {self.requests} requests, "
            f"{self.tokens} tokens, 0 lost, repeated or changed"
        )


def cases(address: str) -> dict[str, Case]:
    """Those of `kill_requests`, a stop string in the middle of what would come, and a floor below which nothing ends."""
    with Client(address) as client:
        text = client.generate("import ", SamplingParams(ignore_eos=True, **_ENDS), timeout_s=120).text
    half = len(text) // 2
    return {
        **kill_requests.cases(),
        "stop string": Case("import ", SamplingParams(ignore_eos=True, stop=[text[half : half + 6]], **_ENDS)),
        "min tokens": Case("return ", SamplingParams(min_tokens=40, **_ENDS)),
    }


def kills(running: Supervised, count: int, seed: int) -> Callable[[Readings], None]:
    """So many, each after some tokens that came since the one before."""
    draw = random.Random(seed)

    def kill(readings: Readings) -> None:
        for _ in range(count):
            readings.wait_for(readings.num_tokens + draw.randrange(1, 200))
            time.sleep(draw.uniform(0, 0.02))
            running.kill("scheduler")

    return kill


def survive(
    running: Supervised, wanted: Mapping[str, Case], expected: Mapping[str, kill_requests.Output], count: int, seed: int
) -> Survived:
    """So many kills. AssertionError where a stream is not what it is `expected` to be, or where a block leaks."""
    before, start = len(running.deaths), time.monotonic()
    address = running.stack.grpc_address
    num_requests, num_tokens = kill_requests.repeat(address, wanted, expected, kills(running, count, seed))
    deaths = running.deaths[before:]
    assert len(deaths) == count and all("was killed by signal 9" in death for death in deaths), deaths
    pool = blocks(running.stack.admin_address)["gpu"]
    assert pool["free"] == pool["total"]
    return Survived(count, num_requests, num_tokens, time.monotonic() - start)
