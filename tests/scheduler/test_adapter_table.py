"""The table of adapters: names and numbers, and that every worker has what requests may name (design.md 6)."""

import asyncio

import pytest

from scheduler_svc.adapters import AdapterTable
from svc_common.errors import FailedPrecondition, InvalidArgument, NotFound
from tests.scheduler.harness import run_async


class Host:
    """A worker that remembers what it holds; `gate`: loads wait for it."""

    def __init__(self, *, fails: bool = False) -> None:
        self.held: dict[int, str] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self._fails = fails

    async def load_adapter(self, adapter_id: int, path: str) -> tuple[int, int]:
        await self.gate.wait()
        if self._fails:
            raise FailedPrecondition("it does not fit", reason="ADAPTER_MISMATCH")
        self.held[adapter_id] = path
        return 100, 8

    async def unload_adapter(self, adapter_id: int) -> None:
        del self.held[adapter_id]


def table_of(*hosts: Host, num_users: int = 0) -> AdapterTable:
    table = AdapterTable(lambda: None, lambda adapter_id: num_users)
    table.hosts.extend(hosts)
    return table


@run_async
async def test_one_name_is_loaded_once_and_a_worker_that_comes_meanwhile_gets_it() -> None:
    """Two calls at once give one number; who is restored while a load is under way has it afterwards."""
    slow, late = Host(), Host()
    table = table_of(slow)
    slow.gate.clear()
    loads = [asyncio.ensure_future(table.load("sql", "/a")) for _ in range(2)]
    await asyncio.sleep(0)
    restored = asyncio.ensure_future(table.restore(late))
    await asyncio.sleep(0)
    slow.gate.set()
    first, second = await asyncio.gather(*loads)
    await restored
    assert first is second and slow.held == late.held == {1: "/a"}


@run_async
async def test_what_one_worker_refuses_no_worker_keeps() -> None:
    """The refusal reaches the caller, and requests cannot name it."""
    good = Host()
    table = table_of(good, Host(fails=True))
    with pytest.raises(FailedPrecondition, match="does not fit"):
        await table.load("sql", "/a")
    assert good.held == {} and table.names == []


@run_async
async def test_unloading() -> None:
    """Not while requests use it; a name that is empty or unknown is told; a number is never given twice."""
    host = Host()
    with pytest.raises(FailedPrecondition, match="3 requests"):
        busy = table_of(Host(), num_users=3)
        await busy.load("sql", "/a")
        await busy.unload("sql")
    table = table_of(host)
    await table.load("sql", "/a")
    await table.unload("sql")
    assert host.held == {}
    with pytest.raises(NotFound, match="none is loaded"):
        await table.unload("sql")
    with pytest.raises(InvalidArgument, match="which adapter"):
        await table.unload("")
    assert (await table.load("sql", "/b")).adapter_id == 2
