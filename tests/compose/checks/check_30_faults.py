"""In containers: what dies, freezes or loses its network costs no stream a token."""

import time

import pytest

from quire.client.sync_client import Client
from quire.operators.admin import AdminClient
from tests.compose.checks.conftest import Figures
from tests.compose.checks.requests import GREEDY, PROMPTS, Streams, client, undisturbed
from tests.compose.stack import ADMIN, Stack, until

AWAY_S = 3.0
BEGUN = 40
"""Tokens after which the fault comes."""


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Tokens of the undisturbed run, the first time that one is asked for."""
    return []


@pytest.fixture
def door(cpu: Stack, expected: list[list[int]]) -> Client:
    """Of a stack at rest; `expected` is filled."""
    quire = client()
    if not expected:
        expected += undisturbed(quire)
        assert all(len(tokens) == GREEDY.max_tokens for tokens in expected)
    return quire


def _begun(door: Client) -> Streams:
    streams = Streams(door).start()
    until(lambda: streams.num_tokens() >= BEGUN, "tokens", pause_s=0.001)
    assert streams.num_tokens() < len(PROMPTS) * GREEDY.max_tokens
    return streams


@pytest.mark.parametrize("service", ["worker", "scheduler"])
def test_killed_it_comes_back_and_no_stream_notices(
    cpu: Stack, door: Client, expected: list[list[int]], figures: Figures, service: str
) -> None:
    """SIGKILL from outside; the restart policy brings it back, streams go on, with the same tokens."""
    restarts = cpu.inspect(service)["RestartCount"]
    with door:
        streams = _begun(door)
        began_s = time.monotonic()
        cpu.kill(service)
        at_kill = streams.num_tokens()
        until(lambda: streams.num_tokens() > at_kill + len(PROMPTS) * 8, "streams to go on", timeout_s=60, pause_s=0.01)
        figures.note(f"{service}_killed_to_tokens_s", time.monotonic() - began_s)
        assert streams.finish() == expected
    assert cpu.inspect(service)["RestartCount"] == restarts + 1
    until(lambda: cpu.is_healthy(service), f"{service} healthy again", timeout_s=60)
    figures.note(f"{service}_killed_to_healthy_s", time.monotonic() - began_s)


@pytest.mark.parametrize(("service", "network"), [("worker", "data"), ("scheduler", "control")])
def test_cut_off_and_back(
    cpu: Stack, door: Client, expected: list[list[int]], figures: Figures, service: str, network: str
) -> None:
    """The network is gone for some seconds; no service ends, streams continue with the same tokens."""
    with door:
        streams = _begun(door)
        with cpu.disconnected(service, network):
            time.sleep(AWAY_S)
            assert not streams.errors
            assert streams.num_tokens() < len(PROMPTS) * GREEDY.max_tokens
        began_s = time.monotonic()
        assert streams.finish() == expected
    figures.note(f"{service}_reconnected_to_done_s", time.monotonic() - began_s)
    until(lambda: cpu.is_healthy(service), f"{service} healthy again", timeout_s=60)


@pytest.mark.parametrize("service", ["worker", "scheduler"])
def test_frozen_and_thawed(cpu: Stack, door: Client, expected: list[list[int]], figures: Figures, service: str) -> None:
    """`docker pause` for some seconds: late, never wrong."""
    with door:
        streams = _begun(door)
        with cpu.paused(service):
            time.sleep(AWAY_S)
            assert streams.num_tokens() < len(PROMPTS) * GREEDY.max_tokens
        began_s = time.monotonic()
        assert streams.finish() == expected
    figures.note(f"{service}_unpaused_to_done_s", time.monotonic() - began_s)
    until(lambda: cpu.is_healthy(service), f"{service} healthy again", timeout_s=60)


def test_a_reader_that_leaves_frees_its_blocks(cpu: Stack, door: Client, figures: Figures) -> None:
    """Asked of the operators' door, through the gateway, which relays it to the scheduler."""
    with AdminClient(ADMIN) as admin:
        with door:
            streams = [door.generate_stream(prompt, GREEDY, timeout_s=60) for prompt in PROMPTS]
            readers = [iter(stream) for stream in streams]
            for reader in readers:
                next(reader)
            assert admin.blocks().tables
            began_s = time.monotonic()
            for stream in streams:
                stream.cancel()
        until(lambda: not admin.blocks().tables, "no block table", timeout_s=10, pause_s=0.02)
        figures.note("readers_left_to_blocks_free_s", time.monotonic() - began_s)
