"""`quire up --workers N`: one scheduler, several worker processes, as a person starts them."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire import SamplingParams
from quire.cli import CONFIG_ERROR_STATUS
from quire.client import Client
from quire.stack import LocalStack
from tests.e2e.commands import blocks, quire, steps

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0)
PROMPTS = [f"import number_{i} as " for i in range(6)]


def tokens_of(stack: LocalStack) -> list[list[int]]:
    """Of all prompts, asked for at once."""
    with Client(stack.grpc_address) as client, ThreadPoolExecutor(len(PROMPTS)) as threads:
        outputs = threads.map(lambda prompt: client.generate(prompt, PARAMS), PROMPTS)
        return [output.outputs[0].token_ids for output in outputs]


def test_two_workers_give_the_tokens_of_one() -> None:
    """R188, R190: `--policy chitu-dp --workers 2`: both run, each request on one; a worker that is killed is not missed."""
    with LocalStack(simulated=True) as one:
        expected = tokens_of(one)
    with LocalStack(simulated=True, policy="chitu-dp", workers=2) as two:
        assert sorted(two.pids) == ["gateway", "scheduler", "worker", "worker-2"]
        assert tokens_of(two) == expected
        lanes: dict[str, set[int]] = {}
        for step in steps(two.admin_address):
            for group in step["scheduled"]:
                lanes.setdefault(group["id"], set()).add(step["lane"])
        assert sorted(lane for [lane] in lanes.values()) == [0, 0, 0, 1, 1, 1]
        os.kill(two.pids["worker-2"], signal.SIGKILL)
        assert tokens_of(two) == expected
        pool = blocks(two.admin_address)["gpu"]
        assert pool["free"] == pool["total"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--workers", "2"), "policy quire: drives one worker, and 2 are given"),
        (
            ("--workers", "2", "--policy", "chitu-dp", "--set", "infer.dp_size=3"),
            "infer.dp_size=3: dp_size=3: there must be as many",
        ),
    ],
)
def test_wrong_numbers_end_the_command(arguments: tuple[str, ...], named: str) -> None:
    """R188: status 2 and one line that says what to give."""
    ports = ("--grpc-port", "0", "--http-port", "0", "--admin-port", "0")
    done = quire("up", "--simulated", *ports, *arguments, check=False)
    assert (done.returncode, done.stdout) == (CONFIG_ERROR_STATUS, "")
    assert named in done.stderr and "--workers" in done.stderr, done.stderr
