"""Services of neighbouring releases: whichever of them is the newer one, they work together; others are refused."""

import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Iterator

import grpc.aio
import pytest

from protos.inference.v1 import inference_pb2 as pb
from svc_common.net import rpc
from svc_common.version import Revisions
from tests.support.services.harness import run_async, scheduler, worker
from tests.support.services.scripted_engine import Gateway, gateway

OLD, NEW, NEWEST = Revisions(7, 7), Revisions(7, 8), Revisions(8, 9)
"""Three releases, one after the other."""
PROMPT = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[300] * 8), stop=pb.StopConditions(max_tokens=3, ignore_eos=True))


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"),
    [(OLD, OLD, 7), (OLD, NEW, 7), (NEW, NEW, 8), (NEW, NEWEST, 8), (OLD, NEWEST, None), (Revisions(3, 3), OLD, None)],
)
def test_both_sides_agree_on_the_newest_that_both_speak(ours: Revisions, theirs: Revisions, agreed: int | None) -> None:
    """Whichever of them asks."""
    assert ours.agreed(theirs) == theirs.agreed(ours) == agreed


def test_a_peer_that_says_one_revision_speaks_that_one() -> None:
    """As peers did before there were ranges."""
    assert rpc.revisions_of(rpc.common_pb2.PeerIdentity(protocol_revision=3)) == Revisions(3, 3)
    assert rpc.revisions_of(rpc.Identity(NEW).message()) == NEW


@contextlib.contextmanager
def release(spoken: Revisions, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Services that start meanwhile are of another release."""
    with monkeypatch.context() as patch:
        patch.setattr(rpc, "Identity", functools.partial(rpc.Identity, spoken))
        yield


@contextlib.asynccontextmanager
async def stack(releases: tuple[Revisions, ...], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateway]:
    """Worker, scheduler and gateway of these releases."""
    async with contextlib.AsyncExitStack() as services:
        with release(releases[0], monkeypatch):
            [worker_address] = await services.enter_async_context(worker())
        with release(releases[1], monkeypatch):
            scheduler_address, _ = await services.enter_async_context(scheduler(worker_address))
        with release(releases[2], monkeypatch):
            running = await services.enter_async_context(gateway(scheduler_address, unreachable_s=2.0))
        yield running


@pytest.mark.processes
@pytest.mark.parametrize(
    "releases", [*itertools.product([OLD, NEW], repeat=3)], ids=lambda each: ", ".join(map(str, each))
)
def test_services_of_neighbouring_releases(releases: tuple[Revisions, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """So each can be replaced first."""

    @run_async
    async def test() -> None:
        async with stack(releases, monkeypatch) as running:
            answer = await running.stub.Generate(PROMPT, timeout=60)
            assert len(answer.choices[0].token_ids) == 3

    test()


@pytest.mark.processes
@pytest.mark.parametrize("number", range(3))
def test_a_release_too_far_is_refused(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request ends with the reason, in which both releases are."""
    releases = tuple(NEWEST if number == other else OLD for other in range(3))

    @run_async
    async def test() -> None:
        async with stack(releases, monkeypatch) as running:
            with pytest.raises(grpc.aio.AioRpcError, match=r"revision (7|8 to 9) .*(7|8 to 9)") as caught:
                await running.stub.Generate(PROMPT, timeout=60)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    test()
