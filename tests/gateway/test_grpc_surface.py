"""The gRPC door's metadata, CountTokens, deadlines with what there is, health by model, metrics."""

import asyncio
import json
import logging
import re

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from gateway_svc.metric_definitions import METRICS
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from protos.inference.v1 import inference_pb2 as pb
from svc_common.errors import DeadlineExceeded, QuireError
from svc_common.net import rpc
from svc_common.observability.log_format import JsonFormatter
from svc_common.version import VERSION
from tests.support.scraping import check_names
from tests.support.services.scripted_engine import asynchronous, finished, pair, tokens

pytestmark = pytest.mark.processes

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SERVING = health_pb2.HealthCheckResponse.SERVING
CHAT = [pb.Message(role="user", content="hi")]


def request(*, partial: bool = False, num_choices: int = 1, **stop: object) -> pb.GenerateRequest:
    made = pb.GenerateRequest(text="abc", stop=pb.StopConditions(**{"max_tokens": 50, **stop}))
    made.sampling.n = num_choices
    if partial:
        made.scheduling.on_deadline = pb.ON_DEADLINE_RETURN_PARTIAL
    return made


def account(**values: object) -> engine_pb2.RequestAccount:
    return engine_pb2.RequestAccount(
        prompt_tokens=3, num_preemptions=2, num_migrations=1, worker_id="w7", queue_ns=5_000_000, **values
    )


async def error_of(call: grpc.aio.Call) -> QuireError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return rpc.from_rpc_error(caught.value)


# --- counting --------------------------------------------------------------------------------------------------------


@asynchronous
async def test_count_tokens_is_what_the_request_would_take() -> None:
    """Of a completion its tokens; of a chat those of the template; and what may come behind them."""
    async with pair() as (_, _, gateway):
        plain = await gateway.stub.CountTokens(pb.CountTokensRequest(generate=request()))
        ids = (await gateway.stub.Tokenize(pb.TokenizeRequest(text="abc"))).token_ids
        assert (plain.prompt_tokens, plain.max_output_tokens) == (len(ids), 50)
        chat = await gateway.stub.CountTokens(pb.CountTokensRequest(chat=pb.ChatRequest(messages=CHAT)))
        model = await gateway.stub.GetModel(pb.GetModelRequest())
        assert chat.prompt_tokens > 1
        assert chat.prompt_tokens + chat.max_output_tokens == model.max_model_len
        for bad, field in ((pb.CountTokensRequest(), "request"), (pb.CountTokensRequest(generate={}), "prompt")):
            error = await error_of(gateway.stub.CountTokens(bad))
            assert (error.status, error.violations[0].field) == ("INVALID_ARGUMENT", field)


# --- metadata --------------------------------------------------------------------------------------------------------


@asynchronous
async def test_headers_and_trailers_of_a_generation() -> None:
    """Ids, version and W3C traceresponse before, what it met behind; unary and stream alike."""
    metadata = (("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-01"), ("x-request-id", "r-1"))
    async with pair() as (_, attachment, gateway):
        for method in (gateway.stub.Generate, gateway.stub.GenerateStream):
            call = method(request(max_tokens=1), metadata=metadata)
            reading = asyncio.ensure_future(_read(call))
            handle = (await attachment.next_submit()).handle
            end = finished(handle, 1)
            end.finished[0].account.CopyFrom(account(accepted_draft_tokens=4, rejected_draft_tokens=1))
            attachment.send(tokens(handle, 0, [65]), end)
            usage = await reading
            before, behind = dict(await call.initial_metadata()), dict(await call.trailing_metadata())
            assert (before["x-request-id"], before["x-quire-version"]) == ("r-1", VERSION)
            assert before["x-trace-id"] == TRACE_ID
            assert re.fullmatch(f"00-{TRACE_ID}-[0-9a-f]{{16}}-01", before["traceresponse"])
            assert behind == {
                "x-queue-ms": "5.000",
                "x-preemptions": "2",
                "x-migrations": "1",
                "x-worker-id": "w7",
            }
            assert (usage.accepted_draft_tokens, usage.rejected_draft_tokens) == (4, 1)


async def _read(call: grpc.aio.Call) -> pb.Usage:
    if isinstance(call, grpc.aio.UnaryUnaryCall):
        return (await call).usage
    return [event async for event in call][-1].usage


# --- deadlines -------------------------------------------------------------------------------------------------------


@asynchronous
async def test_the_scheduler_ends_a_request_at_its_deadline_with_what_there_is() -> None:
    """DEADLINE for what is not finished, what has ended by itself stays so, status OK, one Usage with its account."""
    async with pair() as (_, attachment, gateway):
        call = asyncio.ensure_future(gateway.stub.Generate(request(partial=True, num_choices=3)))
        handle = (await attachment.next_submit()).handle
        attachment.send(
            tokens(handle, 0, [65, 66]),
            tokens(handle, 0, [67], choice=1),
            finished(handle, 1, choice=1, last=False),
            _failed(handle, DeadlineExceeded("over", reason="DURING_DECODE")),
        )
        answer = await call
    assert [choice.finished.reason for choice in answer.choices] == [
        common_pb2.FINISH_REASON_DEADLINE,
        common_pb2.FINISH_REASON_LENGTH,
        common_pb2.FINISH_REASON_DEADLINE,
    ]
    assert [list(choice.token_ids) for choice in answer.choices] == [[65, 66], [67], []]
    assert (answer.usage.completion_tokens, answer.usage.timing.num_preemptions) == (3, 2)


@asynchronous
async def test_the_gateway_ends_it_where_the_scheduler_is_silent() -> None:
    """Either side notices first; the stream ends with Finished and Usage, and the scheduler is told."""
    async with pair(max_request_s=1.5) as (_, attachment, gateway):
        call = gateway.stub.GenerateStream(request(partial=True))
        reading = asyncio.ensure_future(_events(call))
        handle = (await attachment.next_submit()).handle
        attachment.send(tokens(handle, 0, [65, 66]))
        events = await reading
        assert [event.WhichOneof("event") for event in events[-2:]] == ["finished", "usage"]
        assert events[-2].finished.reason == common_pb2.FINISH_REASON_DEADLINE
        assert events[-1].usage.completion_tokens == 2
        assert [cancel.handle for cancel in (await attachment.next()).cancels] == [handle]


async def _events(call: grpc.aio.UnaryStreamCall) -> list[pb.GenerateEvent]:
    return [event async for event in call]


@pytest.mark.parametrize(("partial", "made"), [(True, []), (False, [65])])
@asynchronous
async def test_without_output_or_wish_a_deadline_is_an_error(partial: bool, made: list[int]) -> None:
    """DEADLINE_EXCEEDED, with where it happened; by the gateway's clock and by the scheduler's word."""
    async with pair(max_request_s=0.8) as (_, attachment, gateway):
        for by_scheduler in (False, True):
            call = gateway.stub.Generate(request(partial=partial))
            waiting = asyncio.ensure_future(error_of(call))
            handle = (await attachment.next_submit()).handle
            if made:
                attachment.send(tokens(handle, 0, made))
            if by_scheduler:
                attachment.send(_failed(handle, DeadlineExceeded("over", reason="EXPIRED_IN_QUEUE")))
            error = await waiting
            assert error.status == "DEADLINE_EXCEEDED"
            if not by_scheduler:
                assert error.reason == ("DURING_DECODE" if made else "EXPIRED_IN_QUEUE")
                await attachment.next()  # the cancel


def _failed(handle: int, error: QuireError) -> engine_pb2.EngineMessage:
    failed = engine_pb2.Failed(handle=handle, error=rpc.to_error_status(error), account=account())
    return engine_pb2.EngineMessage(failed=[failed])


@asynchronous
async def test_a_complete_request_without_account_is_no_failure_at_its_deadline() -> None:
    """A stop string ended all of it here; the account does not come, the deadline does."""
    async with pair(max_request_s=1.0) as (_, attachment, gateway):
        call = asyncio.ensure_future(gateway.stub.Generate(request(stop_strings=["B"])))
        handle = (await attachment.next_submit()).handle
        ids = (await gateway.stub.Tokenize(pb.TokenizeRequest(text="aB"))).token_ids
        attachment.send(tokens(handle, 0, list(ids)))
        answer = await call
    assert (answer.choices[0].text, answer.choices[0].finished.stop_string) == ("a", "B")


# --- health and metrics ----------------------------------------------------------------------------------------------


@asynchronous
async def test_health_by_model_and_adapter() -> None:
    """grpc.health.v1: the served name is a service; an adapter that goes is unknown again."""
    async with pair() as (_, attachment, gateway):
        health = health_pb2_grpc.HealthStub(gateway.channel)
        await gateway.stub.Tokenize(pb.TokenizeRequest(text="a"))  # the model is there
        model = (await gateway.stub.ListModels(pb.ListModelsRequest())).models[0].name
        attachment.send(_state(adapters=["sql"]))
        await _until_health(health, "sql", SERVING)
        await _until_health(health, model, SERVING)
        attachment.send(_state(adapters=[], serving=False))
        await _until_health(health, model, health_pb2.HealthCheckResponse.NOT_SERVING)
        await _until_health(health, "sql", health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)


def _state(*, adapters: list[str], serving: bool = True) -> engine_pb2.EngineMessage:
    return engine_pb2.EngineMessage(state=engine_pb2.ServiceState(serving=serving, adapters=adapters))


async def _until_health(health: health_pb2_grpc.HealthStub, name: str, status: int) -> None:
    async for answer in health.Watch(health_pb2.HealthCheckRequest(service=name), timeout=40):
        if answer.status == status:
            return


@asynchronous
async def test_metrics_count_calls_tokens_and_errors_and_no_texts() -> None:
    """GET /metrics: gen_ai.* by model and operation, calls by status, errors by documented reason, what is in flight."""
    async with pair() as (_, attachment, gateway), httpx.AsyncClient(base_url=f"http://{gateway.http}") as http:
        streaming = gateway.stub.GenerateStream(request(max_tokens=9))
        reading = asyncio.ensure_future(_events(streaming))
        handle = (await attachment.next_submit()).handle
        attachment.send(tokens(handle, 0, [65]))
        values = await _metrics(http, 'quire_gateway_requests_in_flight{operation="text_completion"} 1.0')
        assert values["quire_gateway_open_streams"] == values["quire_gateway_scheduler_requests"] == 1
        assert values["quire_gateway_scheduler_attached"] == values["quire_gateway_scheduler_serving"] == 1
        attachment.send(tokens(handle, 1, [66, 67]), finished(handle, 3))
        await reading
        model = (await gateway.stub.GetModel(pb.GetModelRequest())).name
        await error_of(gateway.stub.Generate(pb.GenerateRequest(text="secret", model="canary")))
        await http.post(
            "/v1/completions", content=b"canary", headers={"content-type": "application/json", "x-request-id": "canary"}
        )
        values = await _metrics(http)
        check_names(text_string_to_metric_families((await http.get("/metrics")).text), METRICS)
    of_model = f'gen_ai_operation_name="text_completion",gen_ai_provider_name="quire",gen_ai_request_model="{model}"'
    assert values[f"gen_ai_server_time_to_first_token_seconds_count{{{of_model}}}"] == 1
    assert values[f'gen_ai_server_request_duration_seconds_count{{error_type="",{of_model}}}'] == 1
    assert values[f'gen_ai_client_token_usage_sum{{{of_model},gen_ai_token_type="output"}}'] == 3
    assert values['quire_gateway_calls_total{door="grpc",method="GenerateStream",status="OK"}'] == 1
    assert values['quire_gateway_calls_total{door="http",method="POST /v1/completions",status="INVALID_ARGUMENT"}'] == 1
    assert values['quire_gateway_errors_total{reason="MODEL_NOT_FOUND",status="NOT_FOUND"}'] == 1
    assert values["quire_gateway_open_streams"] == 0
    assert not any("canary" in name or "secret" in name for name in values)


async def _metrics(http: httpx.AsyncClient, until: str = "") -> dict[str, float]:
    """Samples by name and labels."""
    while True:
        answer = await http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        if until in answer.text:
            samples = [line.rpartition(" ") for line in answer.text.splitlines() if not line.startswith("#")]
            return {name: float(value) for name, _, value in samples}
        await asyncio.sleep(0.01)


@asynchronous
async def test_each_call_has_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """At INFO, at both doors: how it ended, and in JSON its ids; the trace is the caller's own, as none is made here."""
    caplog.set_level(logging.INFO, "gateway_svc.metrics")
    formatter = JsonFormatter("gateway")
    lines: list[dict[str, str]] = []

    def write(record: logging.LogRecord) -> bool:
        lines.append(json.loads(formatter.format(record)))
        return True

    logging.getLogger("gateway_svc.metrics").addFilter(write)
    try:
        async with pair() as (_, attachment, gateway), httpx.AsyncClient(base_url=f"http://{gateway.http}") as http:
            ids = (("x-request-id", "by-grpc"), ("traceparent", f"00-{TRACE_ID}-{'b' * 16}-01"))
            streaming = gateway.stub.GenerateStream(request(max_tokens=1), metadata=ids)
            reading = asyncio.ensure_future(_events(streaming))
            handle = (await attachment.next_submit()).handle
            attachment.send(tokens(handle, 0, [65]), finished(handle, 1))
            await reading
            await http.post(
                "/v1/completions",
                content=b"{}",
                headers={"content-type": "application/json", "x-request-id": "by-http"},
            )
            await http.get("/v1/models")
    finally:
        logging.getLogger("gateway_svc.metrics").removeFilter(write)
    said = {line["request_id"]: line for line in lines if "request_id" in line}
    assert said["by-grpc"]["message"] == "grpc GenerateStream ended: OK"
    assert (said["by-grpc"]["trace_id"], said["by-grpc"]["service"]) == (TRACE_ID, "gateway")
    assert said["by-http"]["message"].startswith("http POST /v1/completions ended: INVALID_ARGUMENT ")
    assert "trace_id" not in said["by-http"] and "tenant" not in said["by-http"]
