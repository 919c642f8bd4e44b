"""The worker's whole life through real gRPC: states, bundle, health, and one scheduler's steps."""

import asyncio
import hashlib
import threading
from collections.abc import Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.worker.v1 import worker_pb2
from quire_tools.simulated_worker.engine import SimulatedEngine
from svc_common import wire_arrays
from svc_common.errors import (
    ConfigError,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from tests.support.worker.builders import Change, Row, ending, run, step, tokens_by_row, typed
from tests.support.worker.running import fast, running
from worker_svc.engine import DeviceLost
from worker_svc.shell.service import CHUNK_BYTES


def go(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


async def health_of(channel: grpc.aio.Channel, service: str = "") -> str:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def test_life_from_start_to_ready() -> None:
    """R8: load, profile, allocate; health and Describe follow."""

    async def test() -> None:
        async with running(fast(load_s=0.05, time_scale=1.0)) as worker:
            assert await health_of(worker.channel) == "NOT_SERVING"
            assert await health_of(worker.channel, "liveness") == "SERVING"
            parts = [part async for part in worker.stub.LoadModel(worker_pb2.LoadModelRequest())]
            fractions = [part.fraction for part in parts]
            assert fractions == sorted(fractions)
            limits = parts[-1].loaded
            assert (limits.model, limits.block_size, limits.max_model_len) == ("simulated", 4, 128)
            assert not any(part.HasField("loaded") for part in parts[:-1])
            assert await health_of(worker.channel) == "NOT_SERVING"
            profile = await worker.stub.ProfileCache(
                worker_pb2.ProfileCacheRequest(max_num_batched_tokens=512, max_num_seqs=64)
            )
            assert (profile.num_gpu_blocks, profile.num_cpu_blocks) == (64, 16)
            assert worker.budgets == [profile.readable]
            allocate = worker_pb2.AllocateCacheRequest(num_gpu_blocks=60, num_cpu_blocks=16)
            await worker.stub.AllocateCache(allocate)
            await worker.stub.AllocateCache(allocate)
            described = await worker.stub.Describe(worker_pb2.DescribeRequest())
            assert described.state == worker_pb2.WORKER_STATE_READY
            assert (described.device, described.limits, described.epoch) == ("simulated", limits, 0)
            assert await health_of(worker.channel) == "SERVING"
            assert await health_of(worker.channel, "quire.worker.v1.WorkerService") == "SERVING"

    go(test())


def test_loading_is_joined_by_every_caller() -> None:
    async def test() -> None:
        engines = []

        def make(settings):
            engines.append(SimulatedEngine(settings))
            return engines[-1]

        async with running(fast(load_s=0.05, time_scale=1.0), make) as worker:

            async def load() -> worker_pb2.LoadModelResponse:
                return [part async for part in worker.stub.LoadModel(worker_pb2.LoadModelRequest())][-1]

            answers = await asyncio.gather(*(load() for _ in range(5)))
            assert all(answer.loaded == answers[0].loaded for answer in answers)
            assert (await load()).loaded == answers[0].loaded
            assert len(engines) == 1

    go(test())


def test_calls_in_the_wrong_state_say_what_to_do() -> None:
    async def test() -> None:
        async with running(fast(load_s=0.3, time_scale=1.0)) as worker:
            stub = worker.stub
            profile = worker_pb2.ProfileCacheRequest(max_num_batched_tokens=8, max_num_seqs=8)
            allocate = worker_pb2.AllocateCacheRequest(num_gpu_blocks=8)
            for call in (stub.ProfileCache(profile), stub.AllocateCache(allocate)):
                with pytest.raises(FailedPrecondition, match="call LoadModel"):
                    async with typed():
                        await call
            with pytest.raises(FailedPrecondition, match="call LoadModel"):
                await run(stub)
            async for _ in stub.LoadModel(worker_pb2.LoadModelRequest()):
                pass
            with pytest.raises(FailedPrecondition, match="call ProfileCache first"):
                async with typed():
                    await stub.AllocateCache(allocate)
            with pytest.raises(FailedPrecondition, match="then AllocateCache"):
                await run(stub)
            await stub.ProfileCache(profile)
            with pytest.raises(InvalidArgument, match="allows 1 to 64"):
                async with typed():
                    await stub.AllocateCache(worker_pb2.AllocateCacheRequest(num_gpu_blocks=65))
            for tokens, seqs, field in (
                (8, 0, "max_num_seqs"),
                (2**31, 8, "max_num_batched_tokens"),
                (2**24, 2**20, "seqs"),
            ):
                with pytest.raises(InvalidArgument, match=field):
                    async with typed():
                        await stub.ProfileCache(
                            worker_pb2.ProfileCacheRequest(max_num_batched_tokens=tokens, max_num_seqs=seqs)
                        )
            await stub.AllocateCache(allocate)
            with pytest.raises(FailedPrecondition, match="has 8 device"):
                async with typed():
                    await stub.AllocateCache(worker_pb2.AllocateCacheRequest(num_gpu_blocks=9))
            assert (await stub.ProfileCache(profile)).num_gpu_blocks == 64, "a known answer, also later"
            with pytest.raises(FailedPrecondition, match="restart the worker for larger steps"):
                async with typed():
                    await stub.ProfileCache(worker_pb2.ProfileCacheRequest(max_num_batched_tokens=9, max_num_seqs=8))

    go(test())


def test_bundle_comes_in_chunks_and_by_digest() -> None:
    class Large(SimulatedEngine):
        def load(self, progress):
            limits = super().load(progress)
            bundle = worker_pb2.ModelBundle.FromString(super().bundle())
            bundle.chat_template += " " * (2 * CHUNK_BYTES)
            self._bundle = bundle.SerializeToString(deterministic=True)
            limits.bundle_digest = hashlib.sha256(self._bundle).hexdigest()
            return limits

    async def test() -> None:
        async with running(make_engine=Large) as worker:
            limits = (await worker.make_ready()).loaded
            request = worker_pb2.GetModelBundleRequest(digest=limits.bundle_digest)
            chunks = [part.chunk async for part in worker.stub.GetModelBundle(request)]
            assert [len(chunk) for chunk in chunks[:2]] == [CHUNK_BYTES] * 2
            assert len(chunks) == 3
            assert hashlib.sha256(b"".join(chunks)).hexdigest() == limits.bundle_digest
            with pytest.raises(NotFound, match=limits.bundle_digest):
                async with typed():
                    await worker.stub.GetModelBundle(worker_pb2.GetModelBundleRequest(digest="ab")).read()

    go(test())


def test_bundle_that_is_not_what_the_limits_say_is_our_bug() -> None:
    class Wrong(SimulatedEngine):
        def bundle(self):
            return b"something else"

    async def test() -> None:
        with pytest.raises(Internal, match="limits say"):
            async with running(make_engine=Wrong) as worker:
                await worker.task

    go(test())


def test_model_that_cannot_be_loaded_reaches_callers_and_ends_the_process() -> None:
    """An unknown model is a clear error for LoadModel's callers and for the worker's starter."""

    class Broken(SimulatedEngine):
        def load(self, progress):
            progress("weights", 0.1)
            self._sleep(0.2)
            raise ConfigError("model.bin is pickled; convert it to safetensors", reason="PICKLED_WEIGHTS")

    async def test() -> None:
        with pytest.raises(ConfigError, match="convert it to safetensors"):
            async with running(make_engine=Broken) as worker:
                with pytest.raises(FailedPrecondition, match="convert it to safetensors") as caught:
                    async with typed():
                        async for _ in worker.stub.LoadModel(worker_pb2.LoadModelRequest()):
                            pass
                assert caught.value.reason == "PICKLED_WEIGHTS"
                await worker.task

    go(test())


def test_reflection_lists_the_service() -> None:
    async def test() -> None:
        async with running() as worker:
            stub = reflection_pb2_grpc.ServerReflectionStub(worker.channel)
            call = stub.ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            names = [service.name for service in (await call.read()).list_services_response.service]
            assert {"quire.worker.v1.WorkerService", "grpc.health.v1.Health"} <= set(names)
            call.cancel()

    go(test())


def test_steps_in_results_out() -> None:
    """Prefill, decode without mention, chunks, removal; computed tokens are counted by the worker."""

    async def test() -> None:
        async with running() as worker:
            await worker.make_ready()
            owner = await run(worker.stub)
            assert (owner.welcome.epoch, owner.welcome.resumed) == (1, False)
            first = await owner.ask(step(1, add=[Row(0, [1, 2, 3], [0], 3), Row(1, [4] * 6, [1, 2], 4)]))
            assert (first.step_id, first.epoch, first.num_computed_tokens) == (1, 1, 7)
            assert list(tokens_by_row(first)) == [0]
            second = await owner.ask(step(2, change=[Change(1, 2)]))
            assert list(tokens_by_row(second)) == [0, 1]
            assert second.num_computed_tokens == 3
            third = await owner.ask(step(3, remove=[0]))
            assert list(tokens_by_row(third)) == [1]
            assert third.num_computed_tokens == 1
            assert third.timings.model_ns > 0
            assert third.timings.queued_ns > 0

    go(test())


def test_steps_may_be_sent_before_results_are_read() -> None:
    """Plan k+1 is written before result k is read; blocks are reused in step order."""

    async def test() -> None:
        async with running() as worker:
            await worker.make_ready()
            owner = await run(worker.stub)
            await owner.send(step(1, add=[Row(0, [1, 2], list(range(10)), 2)]))
            for step_id in range(2, 31):
                await owner.send(step(step_id))
            await owner.call.done_writing()
            answers = [await owner.read() for _ in range(30)]
            assert [answer.step_id for answer in answers] == list(range(1, 31))
            assert all(tokens_by_row(answer)[0] for answer in answers)
            assert await owner.call.read() is grpc.aio.EOF
            assert await owner.call.code() == grpc.StatusCode.OK

    go(test())


def test_multi_step_returns_several_tokens_equal_to_single_steps() -> None:
    async def test() -> None:
        async with running() as worker:
            await worker.make_ready()
            owner = await run(worker.stub)
            rows = [Row(0, [1, 2], [0, 1, 2], 2, logprobs=True), Row(1, [3], [3, 4, 5], 1)]
            several = await owner.ask(step(1, add=rows, num_decode_steps=4))
            assert several.num_computed_tokens == 3 + 3 * 2
            assert len(wire_arrays.unpack(several.logprobs, "logprobs", wire_arrays.F32)) == 8
            again = [Row(r.row, r.tokens, r.blocks, r.num_tokens, incarnation=2) for r in rows]
            singles = [await owner.ask(step(2, remove=[0, 1], add=again))]
            singles += [await owner.ask(step(i)) for i in (3, 4, 5)]
            expected = {row: [t for s in singles for t in tokens_by_row(s)[row]] for row in (0, 1)}
            assert tokens_by_row(several) == expected

    go(test())


def test_refused_step_is_answered_with_its_error_and_the_next_goes_on() -> None:
    """A failing step is WorkerOutputs.error for that step; the process goes on."""

    async def test() -> None:
        async with running() as worker:
            await worker.make_ready()
            owner = await run(worker.stub)
            await owner.ask(step(1, add=[Row(0, [1, 2], [0, 1], 2)]))
            bad = await owner.ask(step(2, change=[Change(9, 1)]))
            assert bad.error.status == "INVALID_ARGUMENT"
            assert bad.error.field_violations[0].field == "changed.rows"
            good = await owner.ask(step(3))
            assert list(tokens_by_row(good)) == [0]

    go(test())


def test_bug_in_a_step_is_internal_with_an_id_and_spares_the_process() -> None:
    class Buggy(SimulatedEngine):
        def execute(self, outputs):
            if outputs.step_id == 2:
                raise ZeroDivisionError("secret")
            return super().execute(outputs)

    async def test() -> None:
        async with running(make_engine=Buggy) as worker:
            await worker.make_ready()
            owner = await run(worker.stub)
            await owner.ask(step(1, add=[Row(0, [1, 2], [0, 1], 2)]))
            bad = await owner.ask(step(2))
            assert bad.error.status == "INTERNAL"
            assert bad.error.metadata["error_id"]
            assert "secret" not in bad.error.message
            assert tokens_by_row(await owner.ask(step(3)))[0]
            assert await health_of(worker.channel) == "SERVING"

    go(test())


class LosesItsDevice(SimulatedEngine):
    """In the third step, after two that take their time."""

    def execute(self, outputs):
        if outputs.step_id >= 3:
            raise DeviceLost("CUDA error: illegal address")
        return super().execute(outputs)


def test_a_worker_that_lost_its_device_gives_its_answers_and_ends() -> None:
    """What was computed goes out, the stream and the service end with the reason, and nothing listens any more."""

    async def test() -> None:
        async with running(fast(time_scale=1.0, step_base_s=0.05), make_engine=LosesItsDevice) as worker:
            await worker.make_ready()
            owner = await run(worker.stub)
            await owner.send(step(1, add=[Row(0, [1, 2], [0, 1], 2)]))
            for step_id in (2, 3, 4):
                await owner.send(step(step_id))
            assert [(await owner.read()).step_id for _ in range(2)] == [1, 2]
            error = await ending(owner.call)
            assert isinstance(error, Unavailable)
            assert error.reason == "DEVICE_LOST" and "illegal address" in str(error)
            with pytest.raises(Unavailable, match=r"the engine is lost: CUDA error.*restart it"):
                await asyncio.wait_for(worker.task, 40)
            with pytest.raises(Unavailable):
                await run(worker.stub, "scheduler-b", force=True)

    go(test())


def test_stopping_finishes_the_steps_in_hand() -> None:
    """SIGTERM: health NOT_SERVING, finish the current step, stop."""
    is_in_step, may_end = threading.Event(), threading.Event()

    class EndsWhenLet(SimulatedEngine):
        def execute(self, outputs):
            is_in_step.set()
            assert may_end.wait(40)
            return super().execute(outputs)

    async def test() -> None:
        async with running(make_engine=EndsWhenLet) as worker:
            await worker.make_ready()
            owner = await run(worker.stub)
            await owner.send(step(1, add=[Row(0, [1, 2], [0, 1], 2)]))
            while not is_in_step.is_set():
                await asyncio.sleep(0.01)
            worker.stop.set()
            while await health_of(worker.channel) != "NOT_SERVING":
                await asyncio.sleep(0.01)
            may_end.set()
            assert tokens_by_row(await owner.read())[0]
            error = await ending(owner.call)
            assert isinstance(error, Unavailable)
            assert error.reason == "WORKER_STOPPING"
            await asyncio.wait_for(worker.task, 40)

    go(test())
