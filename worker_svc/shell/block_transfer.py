"""Blocks from one worker to another: reads them here for a peer, or fetches a peer's into an image (`block_images`).

On one machine they go through a file in shared memory that the fetching worker makes, else in pieces over the call's stream.
"""

import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

from protos.worker.v1 import worker_pb2, worker_pb2_grpc
from svc_common import wire_arrays
from svc_common.errors import Aborted, ConfigError, FailedPrecondition, InvalidArgument
from svc_common.net import rpc
from svc_common.net.peers import Peers
from svc_common.net.tls_settings import WORKER
from worker_svc.engine import Engine
from worker_svc.shell.engine_thread import EngineThread
from worker_svc.shell.lifecycle import Lifecycle

T = TypeVar("T")

_PIECE_BYTES = 2**20
_AT_ONCE_BYTES = 16 * 2**20
"""What is read between two steps."""
_NONCE_BYTES = 32
_HOLE = -1
"""In the place of a block that nothing reads; the image has zeros there."""
_SHARED = Path("/dev/shm")
_PREFIX = "quire-blocks-"


class BlockTransfer:
    """Moves blocks between this worker's engine and other workers. Lives on the event loop; `epoch()`: the present one."""

    def __init__(
        self, lifecycle: Lifecycle, thread: EngineThread, peers: Peers, boot_id: str, epoch: Callable[[], int]
    ) -> None:
        self._lifecycle, self._thread, self._peers = lifecycle, thread, peers
        self._boot_id, self._epoch = boot_id, epoch

    # --- the worker that has the blocks ------------------------------------------------------------------------------

    async def read(self, request: worker_pb2.ReadBlocksRequest) -> AsyncIterator[worker_pb2.ReadBlocksResponse]:
        """The answers of ReadBlocks. Raises Aborted for another epoch or process, FailedPrecondition for another layout."""
        self._check_owner(request.epoch)
        if request.boot_id != self._boot_id:
            raise Aborted(f"the process of boot id {request.boot_id} is over", reason="EPOCH_OVER")
        if request.layout != self._lifecycle.engine.cache_layout:
            raise FailedPrecondition(
                f"the blocks of the caller are {request.layout}, and those of this worker {self._lifecycle.engine.cache_layout}",
                reason="CACHE_LAYOUT",
            )
        blocks: list[int] = wire_arrays.unpack(request.block_ids, "block_ids", minimum=0).tolist()
        shared = _opened(request.shared_file, request.nonce)
        if shared is None:
            async for data in self._pieces(request.epoch, blocks):
                for start in range(0, len(data), _PIECE_BYTES):
                    yield worker_pb2.ReadBlocksResponse(data=bytes(data[start : start + _PIECE_BYTES]))
            return
        with os.fdopen(shared, "r+b", buffering=0) as file:
            async for data in self._pieces(request.epoch, blocks):
                file.write(data)
        yield worker_pb2.ReadBlocksResponse(is_shared=True)

    async def _pieces(self, epoch: int, blocks: list[int]) -> AsyncIterator[memoryview]:
        num_at_once = max(1, _AT_ONCE_BYTES // self._lifecycle.engine.block_bytes)
        for start in range(0, len(blocks), num_at_once):
            some = blocks[start : start + num_at_once]
            yield await self._in_epoch(epoch, lambda engine, some=some: engine.read_blocks(some))  # type: ignore[misc]

    # --- the worker that fetches them --------------------------------------------------------------------------------

    async def fetch(self, request: worker_pb2.FetchBlocksRequest) -> worker_pb2.FetchBlocksResponse:
        """The answer of FetchBlocks. Raises the errors of the other worker."""
        self._check_owner(request.epoch)
        if not request.image:
            raise InvalidArgument.field("image", "is empty")
        try:
            self._peers.check(request.source, WORKER)
        except ConfigError as error:
            raise InvalidArgument.field("source", error.message) from None
        wanted = wire_arrays.unpack(request.block_ids, "block_ids", minimum=_HOLE)
        is_block = wanted != _HOLE
        data, is_shared = await self._read(request, wanted[is_block]) if is_block.any() else (b"", False)
        await self._in_epoch(
            request.epoch,
            lambda engine: engine.images.put(
                request.image, request.num_before, _with_holes(data, is_block, engine.block_bytes)
            ),
        )
        return worker_pb2.FetchBlocksResponse(num_bytes=len(data), is_shared=is_shared)

    async def _read(self, request: worker_pb2.FetchBlocksRequest, blocks: NDArray[np.int32]) -> tuple[bytes, bool]:
        """The other worker's blocks, of which there are some, and whether they came through shared memory."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        with _made_shared(nonce) as (name, file):
            data, is_shared = await self._ask(request, blocks, name, nonce)
            if is_shared:
                assert file is not None
                file.seek(0)
                data = file.read()
        return data, is_shared

    async def _ask(
        self, request: worker_pb2.FetchBlocksRequest, blocks: NDArray[np.int32], shared_file: str, nonce: bytes
    ) -> tuple[bytes, bool]:
        question = worker_pb2.ReadBlocksRequest(
            epoch=request.source_epoch,
            boot_id=request.source_boot_id,
            block_ids=wire_arrays.pack(blocks),
            layout=self._lifecycle.engine.cache_layout,
            shared_file=shared_file,
            nonce=nonce,
        )
        data = bytearray()
        async with self._peers.channel(request.source, WORKER) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
            try:
                async for answer in stub.ReadBlocks(question):
                    if answer.is_shared:
                        return b"", True
                    data += answer.data
            except grpc.RpcError as error:
                raise rpc.from_rpc_error(error) from None
        return bytes(data), False

    async def drop(self, request: worker_pb2.DropImageRequest) -> None:
        """Drop an image."""
        await self._in_epoch(request.epoch, lambda engine: engine.images.drop(request.image))

    # --- both --------------------------------------------------------------------------------------------------------

    def _check_owner(self, epoch: int) -> None:
        self._lifecycle.require_ready()
        if epoch != self._epoch():
            raise Aborted(f"epoch {epoch} of this worker is over; it is {self._epoch()}", reason="EPOCH_OVER")

    async def _in_epoch(self, epoch: int, work: Callable[[Engine], T]) -> T:
        """Run on the engine's thread, between two steps. Raises Aborted if the epoch is over by then."""

        def job() -> T:
            self._check_owner(epoch)
            return work(self._lifecycle.engine)

        return await self._thread.submit(job)


def _with_holes(data: bytes, is_block: NDArray[np.bool_], block_bytes: int) -> bytes:
    """The fetched blocks at their places, and zeros at the others. Raises FailedPrecondition if there are more or fewer."""
    if is_block.all():
        return data
    if len(data) != is_block.sum() * block_bytes:
        raise FailedPrecondition(
            f"{is_block.sum()} blocks of {block_bytes} bytes were asked for, and {len(data)} bytes came",
            reason="IMAGE_DIFFERS",
        )
    whole = np.zeros((len(is_block), block_bytes), np.uint8)
    whole[is_block] = np.frombuffer(data, np.uint8).reshape(-1, block_bytes)
    return whole.tobytes()


@contextmanager
def _made_shared(nonce: bytes) -> Iterator[tuple[str, BinaryIO | None]]:
    """Name of a new file in shared memory that only this user reads, and the file; "" and None where there can be none.

    The peer that opens it removes its name before it writes, so that a killed process leaves no blocks in memory.
    """
    path = _SHARED / f"{_PREFIX}{secrets.token_hex(16)}"
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError:
        yield "", None
        return
    try:
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            file.write(nonce)
            yield path.name, file
    finally:
        path.unlink(missing_ok=True)


def _opened(name: str, nonce: bytes) -> int | None:
    """The peer's shared file, at its beginning and without its name; None if it is not on this machine, or is none.

    A peer can have only files written that it knows the beginning of, that are in the folder of shared memory, and that this
    user owns.
    """
    if len(nonce) != _NONCE_BYTES or not name.startswith(_PREFIX) or "/" in name:
        return None
    try:
        found = os.open(_SHARED / name, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    if os.read(found, _NONCE_BYTES + 1) != nonce or os.fstat(found).st_uid != os.getuid():
        os.close(found)
        return None
    os.unlink(_SHARED / name)
    os.lseek(found, 0, os.SEEK_SET)
    return found
