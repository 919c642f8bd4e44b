"""WorkerService: maps worker.proto's calls to lifecycle and steps.

Only this file (and `app.py`) touches gRPC calls.

Streaming handlers are async generators: tracing instrumentation cannot follow other kinds.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from protos.worker.v1 import worker_pb2, worker_pb2_grpc
from svc_common.errors import InvalidArgument
from svc_common.net import rpc
from worker_svc.shell.block_transfer import BlockTransfer
from worker_svc.shell.lifecycle import Lifecycle
from worker_svc.shell.owned_steps import OwnedSteps
from worker_svc.shell.step_stream import StepStream

Context = grpc.aio.ServicerContext[Any, Any]
CHUNK_BYTES = 2**20


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """The RPC handlers. Their only state is the calls' own tasks."""

    def __init__(
        self, lifecycle: Lifecycle, owned_steps: OwnedSteps, transfer: BlockTransfer, identity: rpc.Identity
    ) -> None:
        self._lifecycle, self._owned_steps, self._identity = lifecycle, owned_steps, identity
        self._transfer = transfer

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Context) -> worker_pb2.DescribeResponse:
        """Identity, state and limits of the worker."""
        described = worker_pb2.DescribeResponse(
            identity=self._identity.message(), state=self._lifecycle.state, epoch=self._owned_steps.epoch
        )
        if self._lifecycle.limits is not None:
            described.limits.CopyFrom(self._lifecycle.limits)
            described.device, described.backend = self._lifecycle.engine.device, self._lifecycle.engine.backend
        return described

    async def LoadModel(
        self, request: worker_pb2.LoadModelRequest, context: Context
    ) -> AsyncIterator[worker_pb2.LoadModelResponse]:
        """Stream the progress until the model is loaded."""
        async with rpc.errors_to_status(context):
            async for progress in self._lifecycle.load_progress():
                yield progress

    async def ProfileCache(
        self, request: worker_pb2.ProfileCacheRequest, context: Context
    ) -> worker_pb2.ProfileCacheResponse:
        """Count the blocks that fit beside the largest step."""
        async with rpc.errors_to_status(context):
            return await self._lifecycle.profile(request.max_num_batched_tokens, request.max_num_seqs)
        raise AssertionError("abort raises")

    async def AllocateCache(
        self, request: worker_pb2.AllocateCacheRequest, context: Context
    ) -> worker_pb2.AllocateCacheResponse:
        """Allocate the cache tensors."""
        async with rpc.errors_to_status(context):
            await self._lifecycle.allocate(request.num_gpu_blocks, request.num_cpu_blocks)
        return worker_pb2.AllocateCacheResponse()

    async def GetModelBundle(
        self, request: worker_pb2.GetModelBundleRequest, context: Context
    ) -> AsyncIterator[worker_pb2.GetModelBundleResponse]:
        """Stream the bundle in chunks of 1 MiB."""
        async with rpc.errors_to_status(context):
            bundle = self._lifecycle.bundle(request.digest)
            for start in range(0, len(bundle), CHUNK_BYTES):
                yield worker_pb2.GetModelBundleResponse(chunk=bundle[start : start + CHUNK_BYTES])

    async def LoadAdapter(
        self, request: worker_pb2.LoadAdapterRequest, context: Context
    ) -> worker_pb2.LoadAdapterResponse:
        """Load an adapter for rows to use."""
        async with rpc.errors_to_status(context):
            num_bytes, rank = await self._lifecycle.load_adapter(request.adapter_id, request.path)
            return worker_pb2.LoadAdapterResponse(num_bytes=num_bytes, rank=rank)
        raise AssertionError("abort raises")

    async def UnloadAdapter(
        self, request: worker_pb2.UnloadAdapterRequest, context: Context
    ) -> worker_pb2.UnloadAdapterResponse:
        """Unload an adapter."""
        async with rpc.errors_to_status(context):
            await self._lifecycle.unload_adapter(request.adapter_id)
        return worker_pb2.UnloadAdapterResponse()

    async def ReadBlocks(
        self, request: worker_pb2.ReadBlocksRequest, context: Context
    ) -> AsyncIterator[worker_pb2.ReadBlocksResponse]:
        """Stream the contents of device blocks to another worker."""
        async with rpc.errors_to_status(context):
            async for piece in self._transfer.read(request):
                yield piece

    async def FetchBlocks(
        self, request: worker_pb2.FetchBlocksRequest, context: Context
    ) -> worker_pb2.FetchBlocksResponse:
        """Fetch blocks of another worker into an image."""
        async with rpc.errors_to_status(context):
            return await self._transfer.fetch(request)
        raise AssertionError("abort raises")

    async def DropImage(self, request: worker_pb2.DropImageRequest, context: Context) -> worker_pb2.DropImageResponse:
        """Drop an image."""
        async with rpc.errors_to_status(context):
            await self._transfer.drop(request)
        return worker_pb2.DropImageResponse()

    async def Run(
        self, request_iterator: AsyncIterator[worker_pb2.SchedulerOutputs], context: Context
    ) -> AsyncIterator[worker_pb2.WorkerOutputs]:
        """Receive steps and send results while the scheduler owns the worker."""
        async with rpc.errors_to_status(context):
            steps = aiter(request_iterator)
            stream = self._owned_steps.open(await _first(steps))
            reader = asyncio.create_task(self._read(stream, steps), name=f"run-{stream.number}")
            # Not only in `finally`: if the call ends while a message is being sent, this generator is never
            # resumed.
            context.add_done_callback(lambda _: self._leave(stream, reader))
            try:
                async for message in stream.messages():
                    yield message
            finally:
                self._leave(stream, reader)

    def _leave(self, stream: StepStream, reader: asyncio.Task[None]) -> None:
        reader.cancel()
        self._owned_steps.close(stream)

    async def _read(self, stream: StepStream, steps: AsyncIterator[worker_pb2.SchedulerOutputs]) -> None:
        """Take steps until the peer ends the stream or makes an error."""
        try:
            await stream.room()
            async for message in steps:
                if stream.is_ended:
                    return
                self._owned_steps.receive(stream, message)
                await stream.room()
        except Exception as error:
            stream.fail(error)
        else:
            stream.finish()


async def _first(steps: AsyncIterator[worker_pb2.SchedulerOutputs]) -> worker_pb2.SchedulerOutputs:
    async for message in steps:
        return message
    raise InvalidArgument.field("hello", "the stream ended before its hello")
