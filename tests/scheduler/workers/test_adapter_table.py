"""The table of adapters: names and numbers, and that every worker has what requests may name."""

import asyncio

import pytest

from scheduler_svc.adapter_names import adapter_paths
from scheduler_svc.workers.adapter_registry import AdapterRegistry
from svc_common.errors import ConfigError, FailedPrecondition, InvalidArgument, NotFound, QuireError, Unavailable
from tests.support.services.harness import run_async


class Host:
    """A worker that remembers what it holds; `gate`: loads wait for it. `error`: what it refuses loads of /bad with."""

    address = "127.0.0.1:4711"

    def __init__(self, error: QuireError | None = None) -> None:
        self.held: dict[int, str] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.error = error

    async def load_adapter(self, adapter_id: int, path: str) -> tuple[int, int]:
        await self.gate.wait()
        if self.error is not None and path == "/bad":
            raise self.error
        self.held[adapter_id] = path
        return 100, 8

    async def unload_adapter(self, adapter_id: int) -> None:
        self.held.pop(adapter_id, None)


async def table_of(*hosts: Host, num_users: int = 0) -> AdapterRegistry:
    table = AdapterRegistry(lambda: None, lambda adapter_id: num_users)
    for host in hosts:
        await table.join(host)
    return table


def gone() -> QuireError:
    return InvalidArgument("path: /bad is no folder", reason="ADAPTER_NOT_FOUND")


@run_async
async def test_one_name_is_loaded_once_and_a_worker_that_comes_meanwhile_gets_it() -> None:
    """Two calls at once give one number; a worker that joins while a load is in progress has it afterwards."""
    slow, late = Host(), Host()
    table = await table_of(slow)
    slow.gate.clear()
    loads = [asyncio.ensure_future(table.load("sql", "/a")) for _ in range(2)]
    await asyncio.sleep(0)
    joined = asyncio.ensure_future(table.join(late))
    await asyncio.sleep(0)
    slow.gate.set()
    first, second = await asyncio.gather(*loads)
    await joined
    assert first is second and slow.held == late.held == {1: "/a"}


@run_async
async def test_what_one_worker_refuses_no_worker_keeps() -> None:
    """The refusal reaches the caller, and requests cannot name it."""
    good = Host()
    table = await table_of(good, Host(gone()))
    with pytest.raises(InvalidArgument, match="no folder"):
        await table.load("sql", "/bad")
    assert good.held == {} and table.names == []


@run_async
async def test_unloading() -> None:
    """Not while requests use it; a name that is empty or unknown is told; a number is never given twice."""
    host = Host()
    with pytest.raises(FailedPrecondition, match="3 requests"):
        busy = await table_of(Host(), num_users=3)
        await busy.load("sql", "/a")
        await busy.unload("sql")
    table = await table_of(host)
    await table.load("sql", "/a")
    await table.unload("sql")
    assert host.held == {}
    with pytest.raises(NotFound, match="none is loaded"):
        await table.unload("sql")
    with pytest.raises(InvalidArgument, match="which adapter"):
        await table.unload("")
    assert (await table.load("sql", "/b")).adapter_id == 2


@run_async
async def test_what_a_joining_worker_cannot_load_is_refused_everywhere() -> None:
    """The others may be used; repeating the load tries again, and so does the worker's next life; unloading ends it."""
    table, host, healthy = await table_of(), Host(gone()), Host()
    for name, path in (("bad", "/bad"), ("good", "/good")):
        table.declare(name, path)
    await table.join(healthy)
    await table.join(host)
    assert table.id_of("good") == 2 and host.held == {2: "/good"}
    for _ in range(2):
        with pytest.raises(
            FailedPrecondition, match=r"bad is not available: .*4711 could not load it: .*is no folder"
        ) as told:
            table.id_of("bad")
        assert told.value.reason == "ADAPTER_UNAVAILABLE"
        assert [adapter.problem != "" for adapter, _ in table.all()] == [True, False]
        with pytest.raises(InvalidArgument, match="no folder"):
            await table.load("bad", "/bad")
    host.error = None
    assert (await table.load("bad", "/bad")).problem == "" and table.id_of("bad") == 1
    host.error = gone()
    table.leave(host)
    await table.join(host)
    await table.unload("bad")
    with pytest.raises(NotFound):
        table.id_of("bad")


@run_async
async def test_a_worker_that_is_gone_blocks_no_other() -> None:
    """What it could not do is forgotten, also when it never joined."""
    table, host = await table_of(Host()), Host(gone())
    await table.load("bad", "/bad")
    await table.join(host)
    table.leave(host)
    table.leave(host)
    assert table.id_of("bad") == 1


@run_async
async def test_a_worker_that_cannot_be_reached_is_not_an_adapters_fault() -> None:
    """Its error goes to the caller that attaches it, which tries again."""
    table = await table_of()
    table.declare("bad", "/bad")
    with pytest.raises(Unavailable):
        await table.join(Host(Unavailable("gone")))
    assert table.id_of("bad") == 1


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["sql"], "'sql': write NAME=PATH"),
        (["sql="], "'sql=': write NAME=PATH"),
        (["=/a"], "'=/a': its name must have 1 to 128"),
        (["a=/a", "a=/b"], "'a=/b': is given twice"),
    ],
)
def test_options_that_name_no_adapter(texts: list[str], said: str) -> None:
    """ConfigError before anything starts."""
    with pytest.raises(ConfigError, match=said):
        adapter_paths(texts)
    assert adapter_paths(["a=/x=y", "b=/b"]) == {"a": "/x=y", "b": "/b"}
