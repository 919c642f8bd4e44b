"""Access at the real listeners: nothing is open by accident, and every refusal has a reason."""

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from starlette.routing import Route

from gateway_svc.access.http_guard import is_open
from gateway_svc.http.server import HttpServer
from protos.inference.v1 import admin_pb2, admin_pb2_grpc
from protos.inference.v1 import inference_pb2 as pb
from svc_common.errors import QuireError
from svc_common.net import rpc
from tests.support.services.access_keys import FILE, KEYS, bearer, metadata, tenants_file
from tests.support.services.scripted_engine import Attachment, Gateway, asynchronous, finished, pair, tokens

pytestmark = pytest.mark.processes

INFERENCE = pb.DESCRIPTOR.services_by_name["InferenceService"]
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
OPEN = {"/health", "/health/live", "/health/ready", "/metrics", "/openapi.json", "/ping", "/version"}
ANSWER_S = 10.0


async def refusal(call: Any) -> QuireError:
    """The error that a gRPC call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await asyncio.wait_for(call, ANSWER_S)
    return rpc.from_rpc_error(failed.value)


async def refused(channel: grpc.aio.Channel, path: str, given: Any = ()) -> QuireError:
    """How a method answers, called as a unary one; its message is no message at all."""
    return await refusal(channel.unary_unary(path)(b"\xff", metadata=given))


def every_method(service: Any) -> list[str]:
    """Paths of all methods of a service."""
    return [f"/{service.full_name}/{method.name}" for method in service.methods]


async def answer_one(attachment: Attachment, request: Any) -> Any:
    """Sends a request and has the scheduler answer it with two tokens; what it was told."""
    task = asyncio.ensure_future(request)
    submit = await attachment.next_submit()
    attachment.send(tokens(submit.handle, 0, [70, 71]), finished(submit.handle, 2))
    await task
    return submit


@asynchronous
async def test_no_grpc_method_is_open_by_accident(tmp_path: Path) -> None:
    """All methods of both services, unknown ones, and reflection where it is off: without a key each is UNAUTHENTICATED."""
    async with pair(tenants=tenants_file(tmp_path), reflection=False) as (_, _, running):
        for address, service in ((running.grpc, INFERENCE), (running.admin, ADMIN)):
            reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
            paths = [*every_method(service), f"/{service.full_name}/Nothing", "/x.Y/Z", reflection]
            async with grpc.aio.insecure_channel(address) as channel:
                for path in paths:
                    for given, reason in (((), "MISSING_KEY"), (metadata("expired"), "EXPIRED_KEY")):
                        error = await refused(channel, path, given)
                        assert (error.status, error.reason) == ("UNAUTHENTICATED", reason), path
                health = health_pb2_grpc.HealthStub(channel)
                assert (await health.Check(health_pb2.HealthCheckRequest(service="liveness"))).status == 1


@asynchronous
async def test_no_admin_method_is_open_to_users(tmp_path: Path) -> None:
    """The relay passes raw bytes on: the check is in front of every method. An operator's key reaches the relay."""
    async with (
        pair(tenants=tenants_file(tmp_path)) as (_, _, running),
        grpc.aio.insecure_channel(running.admin) as channel,
    ):
        for path in every_method(ADMIN):
            error = await refused(channel, path, metadata("acme"))
            assert (error.status, error.reason) == ("PERMISSION_DENIED", "ADMIN_KEY_NEEDED"), path
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        error = await refusal(stub.GetBlocks(admin_pb2.GetBlocksRequest(), metadata=metadata("operator")))
        assert error.reason == "SCHEDULER_AWAY"  # the scripted scheduler has no such door


@asynchronous
async def test_no_http_route_is_open_by_accident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All routes of the application with all their methods, those of health, metrics and version aside."""
    served: list[Any] = []
    make = HttpServer.__init__

    def spy(self: HttpServer, app: Any, *more: Any) -> None:
        served.append(app)
        make(self, app, *more)

    monkeypatch.setattr(HttpServer, "__init__", spy)
    async with pair(tenants=tenants_file(tmp_path)) as (_, _, running):
        routes = [route for route in served[0]._app.routes if isinstance(route, Route)]
        assert len(routes) > 8
        async with httpx.AsyncClient(base_url=f"http://{running.http}", timeout=ANSWER_S, verify=False) as http:
            for route in routes:
                path = route.path.replace("{name:path}", "tiny")
                for method in route.methods or ():
                    answer = await http.request(method, path)
                    assert (answer.status_code == 401) == (path not in OPEN), (method, path)
            for path in (
                "/",
                "/v1",
                "/docs",
                "//health",
                "/health/../v1/models",
                "/metricsx",
                "/HEALTH",
                "/v1/health/live",
            ):
                assert (await http.get(path)).status_code == 401, path


def test_open_paths_are_few() -> None:
    """The allowlist, word for word."""
    assert all(map(is_open, OPEN))
    assert not any(map(is_open, ("/v1/models", "/healthy", "/health.json", "/metrics/x", "/tokenize", "")))


@asynchronous
async def test_a_refusal_over_http(tmp_path: Path) -> None:
    """401 with WWW-Authenticate, 403, in OpenAI's shape; before the body is read."""
    async with (
        pair(tenants=tenants_file(tmp_path)) as (_, _, running),
        httpx.AsyncClient(base_url=f"http://{running.http}", timeout=ANSWER_S, verify=False) as http,
    ):
        for headers in ({}, {"authorization": "Bearer nobody"}, bearer("expired")):
            answer = await http.post(
                "/v1/completions", content=b"{", headers={"content-type": "application/json", **headers}
            )
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert answer.json()["error"]["type"] == "authentication_error"
            assert answer.json()["error"]["code"] == "invalid_api_key"
        body = {"model": "tiny", "prompt": "x", "priority": 3}
        answer = await http.post("/v1/completions", json=body, headers=bearer("acme"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "priority_not_allowed")
        named = bearer("acme") | {"x-tenant-id": "globex"}
        answer = await http.get("/v1/models", headers=named)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "tenant_not_allowed")


@asynchronous
async def test_models_that_a_tenant_may_not_use(tmp_path: Path) -> None:
    """Refused at both doors by every method that takes a model's name, and not listed, under an alias neither."""
    async with (
        pair(tenants=tenants_file(tmp_path), model_aliases=("usual",)) as (_, _, running),
        httpx.AsyncClient(
            base_url=f"http://{running.http}", headers=bearer("globex"), timeout=ANSWER_S, verify=False
        ) as http,
    ):
        stub, key = running.stub, metadata("globex")
        await stub.Tokenize(pb.TokenizeRequest(text="x"), metadata=metadata("acme"))  # the model is there
        generate = pb.GenerateRequest(model="tiny", text="x")
        conversation = pb.ChatRequest(messages=[pb.Message(role="user", content="x")])
        calls = [
            stub.Generate(generate, metadata=key),
            stub.Generate(pb.GenerateRequest(text="x"), metadata=key),
            stub.GenerateStream(generate, metadata=key).read(),
            stub.Chat(conversation, metadata=key),
            stub.ChatStream(conversation, metadata=key).read(),
            stub.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(text="x")]), metadata=key),
            stub.Tokenize(pb.TokenizeRequest(text="x"), metadata=key),
            stub.Detokenize(pb.DetokenizeRequest(token_ids=[70]), metadata=key),
            stub.CountTokens(pb.CountTokensRequest(generate=generate), metadata=key),
            stub.GetModel(pb.GetModelRequest(model="tiny"), metadata=key),
        ]
        for number, call in enumerate(calls):
            error = await refusal(call)
            assert (error.status, error.reason) == ("PERMISSION_DENIED", "MODEL_NOT_ALLOWED"), number
        assert len((await stub.ListModels(pb.ListModelsRequest(), metadata=key)).models) == 0
        assert len((await stub.ListModels(pb.ListModelsRequest(), metadata=metadata("acme"))).models) == 1
        assert (await http.get("/v1/models")).json()["data"] == []
        cards = (await http.get("/v1/models", headers=bearer("acme"))).json()["data"]
        assert [card["id"] for card in cards] == ["tiny", "usual"]
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/embeddings", {"input": "x"}),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [70]}),
        ):
            assert (await http.post(path, json={"model": "tiny", **body})).status_code == 403, path
        assert (await http.get("/v1/models/tiny")).status_code == 403


@asynchronous
async def test_a_request_is_its_tenants(tmp_path: Path) -> None:
    """Tenant, priority and salt reach the scheduler; a tenant that a proxy names is served on its own terms."""
    async with pair(tenants=tenants_file(tmp_path)) as (_, attachment, running):
        request = pb.GenerateRequest(text="x", scheduling=pb.Scheduling(priority=2))
        mine = await answer_one(attachment, running.stub.Generate(request, metadata=metadata("acme")))
        named = metadata("proxy", x_tenant_id="acme")
        through = await answer_one(attachment, running.stub.Generate(request, metadata=named))
        assert (mine.tenant, mine.priority, through.tenant) == ("acme", -2, "acme")
        assert mine.cache_salt == through.cache_salt != ""
        plain = pb.GenerateRequest(text="x")
        other = await answer_one(attachment, running.stub.Generate(plain, metadata=metadata("operator")))
        assert (other.tenant, other.cache_salt == mine.cache_salt) == ("house", False)


QUOTA = FILE.replace("max_priority = 2", "max_priority = 2\nrequests_per_s = 0.5\nburst = 2")
TOKENS = FILE.replace("max_priority = 2", "tokens_per_min = 60")


@asynchronous
async def test_a_quota_that_is_used_up(tmp_path: Path) -> None:
    """RESOURCE_EXHAUSTED with RetryInfo and QuotaFailure, 429 with Retry-After; another tenant and Cancel are not touched."""
    async with (
        pair(tenants=tenants_file(tmp_path, QUOTA)) as (_, _, running),
        httpx.AsyncClient(
            base_url=f"http://{running.http}", headers=bearer("acme"), timeout=ANSWER_S, verify=False
        ) as http,
    ):
        assert (await http.get("/v1/models")).status_code == 200
        await running.stub.ListModels(pb.ListModelsRequest(), metadata=metadata("acme"))
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await running.stub.ListModels(pb.ListModelsRequest(), metadata=metadata("acme"))
        status = rpc_status.from_call(failed.value)
        kinds = {detail.TypeName().rpartition(".")[2] for detail in status.details}
        assert {"ErrorInfo", "RetryInfo", "QuotaFailure"} <= kinds
        quota = error_details_pb2.QuotaFailure()
        next(detail for detail in status.details if detail.Is(quota.DESCRIPTOR)).Unpack(quota)
        assert [(v.subject, v.description) for v in quota.violations] == [("tenant:acme", "requests_per_s = 0.5")]
        error = rpc.from_rpc_error(failed.value)
        assert (error.status, error.reason) == ("RESOURCE_EXHAUSTED", "TENANT_QUOTA")
        assert error.quota is not None
        assert 0 < (error.retry_after_s or 0) <= 2
        answer = await http.get("/v1/models")
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(answer.headers["retry-after"]) in {1, 2}
        await running.stub.Cancel(pb.CancelRequest(request_id="x"), metadata=metadata("acme"))
        await running.stub.ListModels(pb.ListModelsRequest(), metadata=metadata("globex"))


async def use(running: Gateway, most: int) -> grpc.aio.UnaryStreamCall:
    """A stream of acme that may cost `most` and one token of prompt."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[70]), stop=pb.StopConditions(max_tokens=most))
    return running.stub.GenerateStream(request, metadata=metadata("acme"))


@asynchronous
async def test_tokens_are_given_back_however_a_request_ends(tmp_path: Path) -> None:
    """60 a minute: what may cost 50 is followed by another only where the first gave back what it did not use."""
    async with pair(tenants=tenants_file(tmp_path, TOKENS)) as (_, attachment, running):
        done = await use(running, 49)
        submit = await attachment.next_submit()
        error = await refusal((await use(running, 49)).read())
        assert (error.reason, error.quota and error.quota.description) == ("TENANT_QUOTA", "tokens_per_min = 60")
        attachment.send(tokens(submit.handle, 0, [70, 71]), finished(submit.handle, 2))
        assert [event.WhichOneof("event") async for event in done][-1] == "usage"
        left = await use(running, 49)
        submit = await attachment.next_submit()
        left.cancel()
        assert (await attachment.next()).cancels[0].handle == submit.handle
        last = await use(running, 49)
        await attachment.next_submit()
        last.cancel()


@asynchronous
async def test_places_are_given_back(tmp_path: Path) -> None:
    """One at a time: the next is refused while one runs, at the other door too, and taken when it is gone."""
    text = FILE.replace("max_priority = 2", "concurrent_requests = 1")
    async with (
        pair(tenants=tenants_file(tmp_path, text)) as (_, attachment, running),
        httpx.AsyncClient(
            base_url=f"http://{running.http}", headers=bearer("acme"), timeout=ANSWER_S, verify=False
        ) as http,
    ):
        first = await use(running, 5)
        await attachment.next_submit()
        assert (await http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})).status_code == 429
        first.cancel()
        await attachment.next()
        second = await use(running, 5)
        await attachment.next_submit()
        second.cancel()


@asynchronous
async def test_keys_are_never_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Right, wrong and misplaced ones, at all doors, at the finest level; SIGHUP has the file read again at once."""
    wrong = "qk_wrong_canary_key_98765"
    with caplog.at_level(logging.DEBUG):
        async with (
            pair(tenants=tenants_file(tmp_path)) as (_, _, running),
            httpx.AsyncClient(base_url=f"http://{running.http}", timeout=ANSWER_S, verify=False) as http,
            grpc.aio.insecure_channel(running.admin) as admin,
        ):
            for header in (KEYS["acme"], wrong, KEYS["operator"]):
                given = (("authorization", f"Bearer {header}"),)
                await http.post(
                    "/v1/completions", content=b"{", headers={"content-type": "application/json", **dict(given)}
                )
                await http.get("/v1/models", headers=dict(given))
                await refused(admin, every_method(ADMIN)[0], given)
                await refused(running.channel, every_method(INFERENCE)[0], given)
            tenants_file(tmp_path, FILE + f'\n[[tenants.house.keys]]\nsha256 = "{wrong}"\n')
            os.kill(os.getpid(), signal.SIGHUP)
            await refused(running.channel, every_method(INFERENCE)[0], given)
    assert "stays in force" in caplog.text
    assert not [key for key in (*KEYS.values(), wrong, "canary") if key in caplog.text]


@asynchronous
async def test_without_a_file_every_caller_is_the_default_tenant() -> None:
    """As before: no key is required, and no caller can name a tenant."""
    async with pair() as (_, attachment, running):
        named = (("x-tenant-id", "acme"),)
        request = pb.GenerateRequest(text="x", cache=pb.CacheOptions(cache_salt="salt"))
        submit = await answer_one(attachment, running.stub.Generate(request, metadata=named))
        assert (submit.tenant, submit.cache_salt) == ("", "salt")
        async with grpc.aio.insecure_channel(running.admin) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            assert (await refusal(stub.GetBlocks(admin_pb2.GetBlocksRequest()))).reason == "SCHEDULER_AWAY"
