"""Decode grants through the services: the same streams with and without them, whatever comes between two steps."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from quire import SamplingParams
from quire.client.messages import RequestOptions
from quire.client.sync_client import Client
from quire.local_stack.stack import LocalStack
from scheduler_svc.observe.recording.file_format import Recording
from scheduler_svc.observe.recording.replay import replay
from tests.support.stack.commands import quire, steps

PROMPTS = ("def fibonacci(n):", "import os\n", "class Point:\n    def ", "for i in range(10):\n    print(", "# A list")


@pytest.fixture(scope="module")
def stacks() -> Iterator[dict[str, LocalStack]]:
    """The built-in model with and without grants."""
    with ExitStack() as running:
        yield {
            option: running.enter_context(
                LocalStack(worker_args=("--dtype", "float32"), scheduler_args=(option,), max_num_seqs=24)
            )
            for option in ("--no-grants", "--grants")
        }


def _params(rng: random.Random) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "ignore_eos": True},
        {"temperature": 0.8, "seed": rng.randrange(1000)},
        {"temperature": 0.8, "seed": rng.randrange(1000), "logprobs": 2, "ignore_eos": True},
        {"temperature": 1.0, "seed": rng.randrange(1000), "stop": ["\n\n", "return"]},
        {"temperature": 0.7, "seed": rng.randrange(1000), "n": 2, "repetition_penalty": 1.2},
        {"temperature": 0.9, "seed": rng.randrange(1000), "min_tokens": 1, "top_k": 20},
    ]
    return SamplingParams(max_tokens=rng.choice([1, 9, 33, 90]), **rng.choice(kinds))


def _outputs(stack: LocalStack, num_requests: int, *, pause_s: float) -> list[object]:
    """Tokens, finish reasons and log probabilities of requests that arrive while others decode; some are cancelled."""
    rng = random.Random(5)
    asked = [(rng.choice(PROMPTS), _params(rng), rng.random() < 0.1) for _ in range(num_requests)]

    def ask(number: int) -> object:
        prompt, params, cancels = asked[number]
        time.sleep(number * pause_s)
        with Client(stack.grpc_address) as client:
            if cancels:
                stream = client.generate_stream(prompt, params)
                next(iter(stream))
                stream.cancel()
                return "cancelled"
            output = client.generate(prompt, params, options=RequestOptions(), timeout_s=120)
            return [(list(o.token_ids), o.finish_reason, o.logprobs) for o in output.outputs]

    with ThreadPoolExecutor(num_requests) as threads:
        return list(threads.map(ask, range(num_requests)))


def test_streams_are_the_same_with_and_without_grants(stacks: dict[str, LocalStack], tmp_path: Path) -> None:
    """Arrivals, cancels, stop strings, stop tokens, samples, penalties, log probabilities; the recording replays identically."""
    found = {option: _outputs(stack, 24, pause_s=0.1) for option, stack in stacks.items()}
    assert found["--grants"] == found["--no-grants"]
    logs = {option: steps(stack.admin_address) for option, stack in stacks.items()}
    assert not any("granted_steps" in step or "is_repeat" in step for step in logs["--no-grants"])
    repeats = sum("is_repeat" in step for step in logs["--grants"])
    granted = sum(step.get("granted_steps", 0) for step in logs["--grants"])
    assert 20 < repeats <= granted
    path = tmp_path / "grants.rec"
    quire("record", "--out", str(path), "--admin", stacks["--grants"].admin_address)
    report = replay(Recording(path).segments())
    assert report.first_difference is None and report.steps > repeats


def test_a_request_waits_for_one_step_at_most(stacks: dict[str, LocalStack]) -> None:
    """An arrival revokes the grant: few granted steps of others are planned between its arrival and its first step."""
    stack = stacks["--grants"]
    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    with Client(stack.grpc_address) as client:
        client.generate("warm", SamplingParams(max_tokens=2))
        stream = client.generate_stream(PROMPTS[0], params)
        tokens = iter(stream)
        for _ in range(20):
            next(tokens)
        client.generate(PROMPTS[1], SamplingParams(max_tokens=1), request_id="late")
        stream.cancel()
    log = steps(stack.admin_address)
    at = next(i for i, step in enumerate(log) if any(g["id"].startswith("late") for g in step["scheduled"]))
    before = log[at - 1]
    assert "is_repeat" in before or "granted_steps" in before, "it came while steps were granted"
    assert "is_repeat" not in log[at]
