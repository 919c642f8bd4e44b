"""The admin API of a running scheduler: load, workers, drain, and what it does with bytes that are no message."""

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.inference.v1 import admin_pb2
from scheduler_svc.admin.service import SERVICE, SERVICE_NAME
from svc_common.net import rpc
from tests.support.services import harness
from tests.support.services.harness import eventually, run_async, stack


@run_async
async def test_load_counts_waiting_and_running_requests_and_output() -> None:
    """GetLoad: queues, waiting tokens with their bounds, pools, tenants, rates."""
    async with stack({"time_scale": 1.0}, policy_set=("max_num_seqs=1",), max_waiting_requests=7) as running:
        gateway = running.gateway
        first = await gateway.submit([1, 2, 3], max_tokens=4000, tenant="acme")
        await gateway.tokens_of(first, 2)
        await gateway.submit([1, 2, 3, 4], max_tokens=4, tenant="")
        await gateway.submit([1, 2], max_tokens=4, tenant="acme")
        load = admin_pb2.GetLoadResponse()
        while load.num_waiting < 2:
            load = await running.admin.stub.GetLoad(admin_pb2.GetLoadRequest())
        assert (load.queues.running, load.num_waiting_tokens, load.max_waiting) == (1, 6, 7)
        assert load.max_waiting_tokens == 4_000_000
        assert load.gpu.free < load.gpu.total
        assert [(t.tenant, t.num_waiting, t.num_running) for t in load.tenants] == [("", 1, 0), ("acme", 1, 1)]
        assert load.output_tokens_per_s > 0
        assert load.serving and not load.draining


@run_async
async def test_workers_are_listed_with_what_is_known_of_them() -> None:
    """ListWorkers: one that runs steps, and one that does not answer."""
    async with stack() as running:
        [worker] = (await running.admin.stub.ListWorkers(admin_pb2.ListWorkersRequest())).workers
        assert (worker.address, worker.lane, worker.ready, worker.reason) == (running.worker_address, 0, True, "")
        assert worker.epoch > 0 and worker.boot_id and worker.model == "simulated" and worker.num_gpu_blocks > 0
    async with harness.scheduler("127.0.0.1:1") as (_, admin_address), harness.Admin(admin_address) as admin:
        worker = admin_pb2.Worker()
        while not worker.reason:
            [worker] = (await admin.stub.ListWorkers(admin_pb2.ListWorkersRequest())).workers
        assert not worker.ready and not worker.boot_id and "cannot be reached" in worker.reason
        load = await admin.stub.GetLoad(admin_pb2.GetLoadRequest())
        assert not load.serving and not load.HasField("gpu")


@run_async
async def test_a_drained_scheduler_takes_nothing_new_and_ends_what_it_has() -> None:
    """Drain: UNAVAILABLE DRAINING with a retry time, not serving for load balancers; a resubmitted request is no new one."""
    async with stack({"time_scale": 0.1}) as running, grpc.aio.insecure_channel(running.address) as channel:
        health, gateway, admin = health_pb2_grpc.HealthStub(channel), running.gateway, running.admin.stub
        first = await gateway.submit([1, 2, 3], max_tokens=200)
        await gateway.tokens_of(first, 1)
        assert (await admin.Drain(admin_pb2.DrainRequest())).num_requests == 1
        await eventually(lambda: not gateway.states[-1].serving, "gateways are told")
        assert "drained" in gateway.states[-1].reason
        refused = (await gateway.end_of(await gateway.submit([1, 2]))).failed
        assert refused is not None
        assert (refused.error.status, refused.error.reason) == ("UNAVAILABLE", "DRAINING")
        assert refused.error.retry_after_ns > 0
        again = await gateway.end_of(await gateway.submit([1, 2], resubmitted=True))
        assert again.finished is not None
        status = (await health.Check(health_pb2.HealthCheckRequest())).status
        assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert len((await gateway.end_of(first)).tokens) == 200
        assert (await admin.GetLoad(admin_pb2.GetLoadRequest())).draining
        assert (await admin.Drain(admin_pb2.DrainRequest(undo=True))).num_requests == 0
        await eventually(lambda: gateway.states[-1].serving, "gateways are told")
        assert (await gateway.end_of(await gateway.submit([1, 2]))).finished is not None


@run_async
async def test_bytes_that_are_no_message_are_the_callers_fault() -> None:
    """Never the transport's INTERNAL or UNKNOWN."""
    async with stack() as running, grpc.aio.insecure_channel(running.admin_address) as channel:
        for method in SERVICE.methods:
            path = f"/{SERVICE_NAME}/{method.name}"
            call = channel.unary_stream(path)(b"\xff\xff\xff") if method.server_streaming else None
            with pytest.raises(grpc.RpcError) as caught:
                if call is None:
                    await channel.unary_unary(path)(b"\xff\xff\xff")
                else:
                    [message async for message in call]
            error = rpc.from_rpc_error(caught.value)
            assert (error.status, error.reason) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE"), method.name


@run_async
async def test_reflection_can_be_left_out() -> None:
    """Setting `reflection`."""
    async with (
        harness.scheduler("127.0.0.1:1", reflection=False) as (address, admin_address),
        grpc.aio.insecure_channel(address) as one,
        grpc.aio.insecure_channel(admin_address) as other,
    ):
        for channel in (one, other):
            call = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
