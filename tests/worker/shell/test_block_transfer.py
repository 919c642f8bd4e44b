"""A sequence that begins on one worker goes on on another one, which fetches its blocks; and what is refused."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from svc_common.errors import Aborted, FailedPrecondition, InvalidArgument, ResourceExhausted
from tests.support.worker.builders import Owner, Row, run, step, tokens_by_row, typed
from tests.support.worker.running import RunningWorker, fast, running
from worker_svc.shell import block_transfer

PROMPT = list(range(30, 41))
"""11 tokens: two full blocks and one of three."""


def go(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


@dataclass(frozen=True)
class Pair:
    """Two workers that one scheduler owns; the first has the prompt in blocks 3, 1, 2 and has drawn one token."""

    source: RunningWorker
    target: RunningWorker
    target_owner: Owner
    boot_id: str
    token: int

    def request(self, **values: object) -> worker_pb2.FetchBlocksRequest:
        """For all its blocks; `values`: what is wrong."""
        defaults = {
            "epoch": 1,
            "image": "a",
            "source": self.source.address,
            "source_epoch": 1,
            "source_boot_id": self.boot_id,
            "block_ids": wire_arrays.pack([3, 1, 2]),
        }
        return worker_pb2.FetchBlocksRequest(**{**defaults, **values})

    async def fetch(self, **values: object) -> worker_pb2.FetchBlocksResponse:
        async with typed():
            return await self.target.stub.FetchBlocks(self.request(**values))
        raise AssertionError("abort raises")

    async def go_on(self, blocks: list[tuple[int, int]], step_id: int = 1) -> worker_pb2.WorkerOutputs:
        """Place the image, and compute the token that was drawn."""
        row = Row(0, [*PROMPT, self.token], [5, 6, 7], 1, num_computed=len(PROMPT), num_prompt=len(PROMPT))
        message = step(step_id, add=[row])
        message.placed.add(image="a", blocks=wire_arrays.pack_pairs(blocks))
        return await self.target_owner.ask(message)


@contextlib.asynccontextmanager
async def pair(**target: object) -> AsyncIterator[Pair]:
    async with running() as first, running(fast(**target)) as second:
        for worker in (first, second):
            await worker.make_ready()
        owner, other = await run(first.stub), await run(second.stub)
        result = await owner.ask(step(1, add=[Row(0, PROMPT, [3, 1, 2], len(PROMPT))]))
        [token] = tokens_by_row(result)[0]
        yield Pair(first, second, other, owner.welcome.identity.boot_id, token)


async def undisturbed() -> list[int]:
    """The second token of a worker that has computed all itself."""
    async with running() as worker:
        await worker.make_ready()
        owner = await run(worker.stub)
        await owner.ask(step(1, add=[Row(0, PROMPT, [3, 1, 2], len(PROMPT))]))
        return tokens_by_row(await owner.ask(step(2)))[0]


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in place of that of shared memory; nothing is left in it."""
    monkeypatch.setattr(block_transfer, "_SHARED", tmp_path)
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared memory", "stream"])
def test_it_goes_on_with_the_same_tokens(is_shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker with the blocks checks their contents itself (simulated: KV_LOST otherwise). In two parts, as they are sent."""
    if not is_shared:
        monkeypatch.setattr(block_transfer, "_SHARED", Path("/nowhere"))

    async def test() -> None:
        async with pair() as workers:
            first = await workers.fetch(block_ids=wire_arrays.pack([3, 1]))
            rest = await workers.fetch(block_ids=wire_arrays.pack([2]), num_before=2)
            assert (first.num_bytes, rest.num_bytes) == (64, 32)
            assert first.is_shared is rest.is_shared is is_shared
            result = await workers.go_on([(0, 5), (1, 6), (2, 7)])
            assert tokens_by_row(result)[0] == await undisturbed()

    go(test())


def test_blocks_that_nothing_reads_are_not_fetched() -> None:
    """Zeros stand for them in the image; blocks behind them are where they belong."""

    async def test() -> None:
        async with pair() as workers:
            assert (await workers.fetch(block_ids=b"")).num_bytes == 0
            first = await workers.fetch(block_ids=wire_arrays.pack([-1, 3, -1, 1]))
            assert first.num_bytes == 64
            rest = await workers.fetch(block_ids=wire_arrays.pack([-1]), num_before=4)
            assert rest.num_bytes == 0
            await workers.fetch(block_ids=wire_arrays.pack([2]), num_before=5)
            result = await workers.go_on([(1, 5), (3, 6), (5, 7)])
            assert tokens_by_row(result)[0] == await undisturbed()

    go(test())


def test_blocks_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other steps run between the pieces that are read, and a piece goes in several messages."""
    monkeypatch.setattr(block_transfer, "_SHARED", Path("/nowhere"))
    monkeypatch.setattr(block_transfer, "_AT_ONCE_BYTES", 64)
    monkeypatch.setattr(block_transfer, "_PIECE_BYTES", 24)

    async def test() -> None:
        async with pair() as workers:
            await workers.fetch()
            assert tokens_by_row(await workers.go_on([(0, 5), (1, 6), (2, 7)]))[0] == await undisturbed()

    go(test())


@pytest.mark.parametrize(
    ("values", "error", "match"),
    [
        ({"epoch": 7}, Aborted, "epoch 7 of this worker is over; it is 1"),
        ({"source_epoch": 7}, Aborted, "epoch 7 of this worker is over; it is 1"),
        ({"source_boot_id": "other"}, Aborted, "boot id other is over"),
        ({"image": ""}, InvalidArgument, "image"),
        ({"block_ids": wire_arrays.pack([64])}, InvalidArgument, "has block 64; must be below 64"),
        ({"block_ids": wire_arrays.pack([-2])}, InvalidArgument, "has -2 where the least allowed is -1"),
        ({"num_before": 1}, FailedPrecondition, "image a has 0 blocks, not 1"),
        ({"block_ids": wire_arrays.pack([1] * 65)}, ResourceExhausted, "more than 64 blocks"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused(values: dict[str, object], error: type[Exception], match: str) -> None:
    """With a typed error; nothing is kept, and the right request works afterwards."""

    async def test() -> None:
        async with pair() as workers:
            with pytest.raises(error, match=match):
                await workers.fetch(**values)
            await workers.fetch()
            assert tokens_by_row(await workers.go_on([(0, 5), (1, 6), (2, 7)]))[0] == await undisturbed()

    go(test())


def test_another_layout_is_refused_with_both() -> None:
    """Blocks of another size would be read as something else."""

    async def test() -> None:
        async with pair(block_size=8) as workers:
            with pytest.raises(
                FailedPrecondition, match=r"blocks of 8, and those of this worker .* blocks of 4"
            ) as caught:
                await workers.fetch()
            assert caught.value.reason == "CACHE_LAYOUT"

    go(test())


@pytest.mark.parametrize("blocks", [[(3, 5)], [(0, 64)]], ids=["image", "device"])
def test_a_step_with_other_blocks_is_refused(blocks: list[tuple[int, int]]) -> None:
    """Before anything changed; so is one with an image that was dropped."""

    async def test() -> None:
        async with pair() as workers:
            await workers.fetch()
            assert (await workers.go_on(blocks)).error.status == "INVALID_ARGUMENT"
            assert tokens_by_row(await workers.go_on([(0, 5), (1, 6), (2, 7)], 2))[0] == await undisturbed()
            await workers.fetch()
            await workers.target.stub.DropImage(worker_pb2.DropImageRequest(epoch=1, image="a"))
            assert (await workers.go_on([(0, 5)], 3)).error.status == "INVALID_ARGUMENT"

    go(test())


@pytest.mark.parametrize("name", ["../etc/passwd", "quire-blocks-../../tmp/x", "quire-blocks-none", ""])
def test_no_other_file_is_written(name: str) -> None:
    """A peer names a file and its beginning: only one in the folder of shared memory, with those bytes, is opened."""
    assert block_transfer._opened(name, bytes(32)) is None


def test_a_file_with_another_beginning_is_left_alone() -> None:
    with block_transfer._made_shared(b"1" * 32) as (name, file):
        assert file is not None
        assert block_transfer._opened(name, b"2" * 32) is None
        file.seek(0)
        assert file.read() == b"1" * 32


def test_a_file_that_was_opened_has_no_name(shared: Path) -> None:
    """So its memory is free when both processes have ended, however they end."""
    with block_transfer._made_shared(b"1" * 32) as (name, file):
        assert file is not None
        found = block_transfer._opened(name, b"1" * 32)
        assert found is not None and list(shared.iterdir()) == []
        os.write(found, b"blocks")
        os.close(found)
        file.seek(0)
        assert file.read().startswith(b"blocks")
