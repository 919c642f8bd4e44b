"""Workers that come back without an adapter that requests use: those fail and are told why, all others go on."""

from typing import Any

import pytest

from protos.inference.v1 import admin_pb2
from svc_common.errors import QuireError
from svc_common.net import rpc
from tests.scheduler.workers.test_worker_loss import SLOW, behind_proxy
from tests.support.services.harness import Admin, Gateway, eventually, run_async, scheduler, stack, worker

PROMPT = list(range(50, 80))
BOTH = {"adapters": ("first=/adapters/first", "second=/adapters/second")}
NAMES = ["", "first", "second"]


async def tokens(gateway: Gateway, name: str, max_tokens: int = 30, **values: Any) -> list[int]:
    """What the prompt gives under an adapter."""
    return (await gateway.end_of(await gateway.submit(PROMPT, adapter=name, max_tokens=max_tokens, **values))).tokens


async def undisturbed() -> dict[str, list[int]]:
    """What it gives when nothing goes wrong."""
    async with stack(**BOTH) as s:
        found = {name: await tokens(s.gateway, name) for name in NAMES}
    assert len({tuple(one) for one in found.values()}) == 3, "no witnesses"
    return found


async def problems(admin: Admin) -> dict[str, str]:
    """Why an adapter cannot be used, by name."""
    answer = await admin.stub.ListAdapters(admin_pb2.ListAdaptersRequest())
    return {adapter.name: adapter.unavailable for adapter in answer.adapters}


async def load(admin: Admin, name: str, path: str) -> None:
    """By the operator; the typed error."""
    await rpc_typed(admin.stub.LoadAdapter(admin_pb2.LoadAdapterRequest(name=name, path=path)))


async def rpc_typed(call: Any) -> Any:
    try:
        return await call
    except Exception as error:
        raise rpc.from_rpc_error(error) from None  # type: ignore[arg-type]


@run_async
async def test_a_request_for_what_another_worker_has_no_room_for_fails_alone() -> None:
    """R35: in the middle of its stream; its blocks come back, the list says why, and an operator can put it right."""
    expected = await undisturbed()
    async with (
        worker(**SLOW) as (first,),
        worker(**SLOW, max_adapters=1) as (second,),
        behind_proxy(first, **BOTH) as (link, gateway, admin),
    ):
        assert await problems(admin) == {"first": "", "second": ""}
        handles = {name: await gateway.submit(PROMPT, adapter=name, max_tokens=30) for name in NAMES}
        for handle in handles.values():
            await gateway.tokens_of(handle, 10)
        link.upstream = second
        link.cut()
        for name in NAMES[:2]:
            assert (await gateway.end_of(handles[name])).tokens == expected[name]
        lost = await gateway.end_of(handles["second"])
        assert lost.failed is not None and lost.tokens == expected["second"][: len(lost.tokens)]
        assert lost.failed.error.status == "FAILED_PRECONDITION"
        assert "adapter second is not available" in lost.failed.error.message
        assert (await gateway.end_of(await gateway.submit(PROMPT, adapter="second"))).failed is not None
        found = await problems(admin)
        assert not found["first"] and "its limit is 1; unload one first" in found["second"]
        with pytest.raises(QuireError, match="its limit is 1"):
            await load(admin, "second", "/adapters/second")
        await rpc_typed(admin.stub.UnloadAdapter(admin_pb2.UnloadAdapterRequest(name="first")))
        await load(admin, "second", "/adapters/second")
        assert await problems(admin) == {"second": ""}
        assert await tokens(gateway, "second") == expected["second"]
        await admin.assert_all_free()


@run_async
async def test_one_of_two_workers_is_without_an_adapter() -> None:
    """It is refused everywhere, wherever there would be room: sequences move between workers. The others are served by both."""
    async with (
        worker() as (first,),
        worker(max_adapters=1) as (second,),
        scheduler(first, second, policy="chitu-dp", **BOTH) as (address, admin_address),
        Admin(admin_address) as admin,
        Gateway(address) as gateway,
    ):
        await eventually(lambda: gateway.states[-1].serving, "the workers are ready")
        assert gateway.states[-1].adapters == ["first", "second"]
        refused = await gateway.end_of(await gateway.submit(PROMPT, adapter="second"))
        assert refused.failed is not None and f"the worker at {second} could not" in refused.failed.error.message
        handles = [await gateway.submit(PROMPT, adapter="first") for _ in range(4)]
        assert len({tuple((await gateway.end_of(handle)).tokens) for handle in handles}) == 1
        assert {report.lane for report in await admin.steps()} == {0, 1}


@run_async
async def test_an_adapter_loaded_while_a_worker_was_away_is_there_when_it_resumes() -> None:
    """The epoch goes on, nothing else is loaded anew, and the first request that names the adapter runs."""
    async with worker(**SLOW, owner_lease_s=20) as (address,), behind_proxy(address) as (link, gateway, admin):
        running = await gateway.submit(PROMPT, max_tokens=30)
        await gateway.tokens_of(running, 5)
        link.upstream = "127.0.0.1:1"
        link.cut()
        await eventually(lambda: not gateway.states[-1].serving, "the loss is noticed")
        await load(admin, "late", "/adapters/late")
        link.upstream = address
        assert len((await gateway.end_of(running)).tokens) == 30
        assert len(await tokens(gateway, "late")) == 30
        assert {report.epoch for report in await admin.steps()} == {1}
