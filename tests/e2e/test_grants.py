"""Decode grants through the services: the same streams with and without them, whatever comes between two steps.

A sample here, beside `LLM`, which grants nothing; two stacks and more requests in `make test-long`; sizes are printed.
"""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.client.messages import RequestOptions
from quire.client.outputs import RequestOutput
from quire.client.sync_client import Client
from quire.local_stack.stack import LocalStack
from scheduler_svc.observe.recording.file_format import Recording
from scheduler_svc.observe.recording.replay import replay
from tests.support.services import harness
from tests.support.stack.commands import last_step, quire_here, steps, steps_since
from tests.support.stack.sizes import SMALL_STEP

Record = Callable[[str, object], None]
SAMPLE, WHOLE = 12, 24
_GRANT_PAUSE_S = 2.5
CANCELLED = "cancelled"
PROMPTS = ("def fibonacci(n):", "import os\n", "class Point:\n    def ", "for i in range(10):\n    print(", "# A list")


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


def _asked(count: int) -> list[tuple[str, SamplingParams, bool]]:
    """Prompts, how they are gone on with, and whether they are cancelled."""
    rng = random.Random(5)
    return [(rng.choice(PROMPTS), _params(rng), rng.random() < 0.1) for _ in range(count)]


def _of(output: RequestOutput) -> object:
    """What is compared."""
    return [(list(o.token_ids), o.finish_reason, o.logprobs) for o in output.outputs]


def _outputs(stack: LocalStack, count: int, *, pause_s: float) -> list[object]:
    """Tokens, finish reasons and log probabilities of requests that arrive while others decode; some are cancelled."""
    asked = _asked(count)

    def ask(number: int) -> object:
        prompt, params, cancels = asked[number]
        time.sleep(number * pause_s)
        with Client(stack.grpc_address) as client:
            if cancels:
                stream = client.generate_stream(prompt, params)
                next(iter(stream))
                stream.cancel()
                return CANCELLED
            return _of(client.generate(prompt, params, options=RequestOptions(), timeout_s=120))

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(ask, range(count)))


def _check_log(stack: LocalStack, first: int, folder: Path) -> str:
    """Steps from number `first` on were granted and repeated; the recording replays identically."""
    time.sleep(_GRANT_PAUSE_S)
    with Client(stack.grpc_address) as client:  # alone, after the pause that the arrivals began
        client.generate([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    log = steps(stack.admin_address, "--since", str(first))
    repeats, granted = sum("is_repeat" in step for step in log), sum(step.get("granted_steps", 0) for step in log)
    assert 20 < repeats <= granted
    path = folder / "grants.rec"
    quire_here("record", "--out", str(path), "--admin", stack.admin_address, check=True)
    report = replay(Recording(path).segments())
    assert report.first_difference is None and report.steps > repeats
    return f"{len(log)} steps, {repeats} of them repeated, {granted} granted"


def test_streams_are_the_same_with_and_without_grants(
    stack: LocalStack, tmp_path: Path, record_property: Record
) -> None:
    """Arrivals, cancels, stop strings, stop tokens, samples, penalties, log probabilities; the recording replays identically."""
    asked, first = _asked(SAMPLE), last_step(stack.admin_address)
    found = _outputs(stack, SAMPLE, pause_s=0.1)
    with LLM(dtype="float32", kv_cache_memory="64MiB", max_num_batched_tokens=SMALL_STEP) as llm:
        alone = llm.generate([prompt for prompt, _, _ in asked], [params for _, params, _ in asked], use_tqdm=False)
    expected = [CANCELLED if one[2] else _of(output) for one, output in zip(asked, alone, strict=True)]
    assert found == expected and CANCELLED in found
    told = _check_log(stack, first + 1, tmp_path)
    record_property("size", f"grants: {SAMPLE} requests, {told}")


@pytest.mark.long
def test_streams_of_two_stacks_are_the_same(tmp_path: Path, record_property: Record) -> None:
    """The same, one of two stacks with `--no-grants`."""
    with ExitStack() as running:
        stacks = {
            option: running.enter_context(
                LocalStack(worker_args=("--dtype", "float32"), scheduler_args=(option,), max_num_seqs=24)
            )
            for option in ("--no-grants", "--grants")
        }
        found = {option: _outputs(stack, WHOLE, pause_s=0.1) for option, stack in stacks.items()}
        assert found["--grants"] == found["--no-grants"]
        log = steps(stacks["--no-grants"].admin_address)
        assert not any("granted_steps" in step or "is_repeat" in step for step in log)
        told = _check_log(stacks["--grants"], 0, tmp_path)
    record_property("size", f"grants: {WHOLE} requests, {told}")


@pytest.mark.parametrize("grants", [False, True])
@harness.run_async
async def test_the_setting_decides(grants: bool) -> None:
    """Without grants each step is planned."""
    async with harness.stack(grants=grants, overlap=False) as running:
        handle = await running.gateway.submit([1, 2, 3], max_tokens=40)
        assert len((await running.gateway.end_of(handle)).tokens) == 40
        log = await running.admin.steps()
    assert any(step.granted_steps or step.is_repeat for step in log) == grants


def test_a_request_waits_for_one_step_at_most(stack: LocalStack) -> None:
    """An arrival revokes the grant: few granted steps of others are planned between its arrival and its first step."""
    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    time.sleep(_GRANT_PAUSE_S)  # what other tests' arrivals began
    first = last_step(stack.admin_address)
    with Client(stack.grpc_address) as client:
        client.generate("warm", SamplingParams(max_tokens=2))
        stream = client.generate_stream(PROMPTS[0], params)
        tokens = iter(stream)
        for _ in range(20):
            next(tokens)
        client.generate(PROMPTS[1], SamplingParams(max_tokens=1), request_id="late")
        stream.cancel()
    log = steps_since(stack.admin_address, first)
    at = next(i for i, step in enumerate(log) if any(g["id"].startswith("late") for g in step["scheduled"]))
    before = log[at - 1]
    assert "is_repeat" in before or "granted_steps" in before, "it came while steps were granted"
    assert "is_repeat" not in log[at]
