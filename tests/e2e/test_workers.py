"""`quire up --workers N`: one scheduler, several worker processes, as a person starts them."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire import SamplingParams
from quire.cli import CONFIG_ERROR_STATUS
from quire.client.sync_client import Client
from quire.local_stack.stack import LocalStack
from tests.support.stack.commands import blocks, quire_here, steps

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0)
PROMPTS = [f"import number_{i} as " for i in range(6)]


def tokens_of(stack: LocalStack) -> list[list[int]]:
    """Of all prompts, asked for at once."""
    with Client(stack.grpc_address) as client, ThreadPoolExecutor(len(PROMPTS)) as threads:
        outputs = threads.map(lambda prompt: client.generate(prompt, PARAMS), PROMPTS)
        return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def two() -> Iterator[LocalStack]:
    """A stack of two simulated workers that reuse what they know."""
    with LocalStack(simulated=True, policy="chitu-dp", workers=2, policy_set=("prefix_caching=true",)) as stack:
        yield stack


def test_requests_go_to_the_worker_that_knows_their_beginning(two: LocalStack) -> None:
    """R190: three topics of 160 tokens, five requests about each, in turn: each topic has one worker, which computes it once."""
    topics = [f"{topic}: " + f"about {topic}, " * 14 for topic in ("a" * 3, "b" * 3, "c" * 3)]
    prompts = [f"{topic[:160]} question {i}" for i in range(5) for topic in topics]
    with Client(two.grpc_address) as client:
        outputs = [client.generate(prompt, SamplingParams(max_tokens=2)) for prompt in prompts]
    assert [output.num_cached_tokens for output in outputs] == [0] * 3 + [160] * 12
    first = {}
    for step in steps(two.admin_address):
        for group in step["scheduled"]:
            first.setdefault(group["id"], (step["lane"], group["computed_before"]))
    lanes = [lane for lane, _ in first.values()]
    assert lanes == [0, 1, 0] * 5, "without it turns would be taken: 0, 1, 0, 1"
    assert [hit for _, hit in first.values()] == [0] * 3 + [160] * 12
    last = json.loads(quire_here("why", outputs[-1].request_id, "--json", "--admin", two.admin_address).stdout)
    assert [e["numbers"]["known"] for e in last["episodes"] if e["reason"] == "PREFIX_AFFINITY"] == [160]


def test_two_workers_give_the_tokens_of_one(two: LocalStack) -> None:
    """R188, R190: `--policy chitu-dp --workers 2`: both run, each request on one; a worker that is killed is not missed, and the
    one that is left gives the same tokens. The last of this stack's tests."""
    assert sorted(two.pids) == ["gateway", "scheduler", "worker", "worker-2"]
    before = len(steps(two.admin_address))
    found = tokens_of(two)
    lanes: dict[str, set[int]] = {}
    for step in steps(two.admin_address)[before:]:
        for group in step["scheduled"]:
            lanes.setdefault(group["id"], set()).add(step["lane"])
    assert sorted(lane for [lane] in lanes.values()) == [0, 0, 0, 1, 1, 1]
    os.kill(two.pids["worker-2"], signal.SIGKILL)
    assert tokens_of(two) == found
    assert steps(two.admin_address)[-1]["lane"] == 0
    pool = blocks(two.admin_address)["gpu"]
    assert pool["free"] == pool["total"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ("--workers", "2", "--policy", "chitu-dp", "--set", "infer.dp_size=3"),
            "infer.dp_size=3: dp_size=3: there must be as many",
        ),
    ],
)
def test_wrong_numbers_end_the_command(arguments: tuple[str, ...], named: str) -> None:
    """R188: status 2 and one line that says what to give."""
    ports = ("--grpc-port", "0", "--http-port", "0", "--admin-port", "0", "--admin-http-port", "0")
    done = quire_here("up", "--simulated", *ports, *arguments)
    assert (done.returncode, done.stdout) == (CONFIG_ERROR_STATUS, "")
    assert named in done.stderr and "--workers" in done.stderr, done.stderr
