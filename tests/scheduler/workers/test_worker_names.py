"""Workers behind a DNS name, which is looked up again: they join, are drained, and leave while requests run."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from protos.inference.v1 import admin_pb2
from scheduler_svc.policy.assembly import policy_of
from scheduler_svc.settings import SchedulerSettings
from svc_common.errors import ConfigError
from svc_common.net.names import AddressDirectory
from tests.support.dns.names import Names, resolving
from tests.support.services.harness import Admin, Gateway, eventually, fresh_port, run_async, scheduler, stack, worker

PROMPTS = [[10 + i, 20, 30, 40] for i in range(9)]
SLOW = {"time_scale": 1.0, "step_base_s": 0.01, "num_gpu_blocks": 60}
NAME = "localhost"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """What NAME resolves to in this process."""
    return resolving(NAME, monkeypatch)


async def ready(admin: Admin) -> list[str]:
    """Hosts of the workers that run steps."""
    answer = await admin.stub.ListWorkers(admin_pb2.ListWorkersRequest())
    return [worker.address.partition(":")[0] for worker in answer.workers if worker.ready]


async def until_ready(admin: Admin, hosts: list[str]) -> None:
    """Waits until exactly these run steps."""
    for _ in range(600):
        if await ready(admin) == hosts:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"ready: {await ready(admin)}, not {hosts}")


@run_async
async def test_workers_come_and_go_with_the_addresses_of_a_name(names: Names) -> None:
    """One address, three, a lookup that fails, two, three again: no token is lost, and each worker has work when it is there."""
    async with stack({**SLOW, "time_scale": 0.0}) as s:
        expected = [(await s.gateway.end_of(h)).tokens for h in await s.gateway.submit_all(PROMPTS, max_tokens=60)]
    port = fresh_port()
    names.addresses = ["127.0.0.2"]
    async with AsyncExitStack() as exits:
        for host in ("127.0.0.2", "127.0.0.3", "127.0.0.4"):
            await exits.enter_async_context(worker(host=host, port=port, **SLOW))
        made = scheduler(f"dns:///{NAME}:{port}", worker_lookup_s=0.05)
        address, admin_address = await exits.enter_async_context(made)
        admin = await exits.enter_async_context(Admin(admin_address))
        gateway = await exits.enter_async_context(Gateway(address))
        await until_ready(admin, ["127.0.0.2"])
        handles = await gateway.submit_all(PROMPTS, max_tokens=60)
        names.addresses = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
        await until_ready(admin, ["127.0.0.2", "127.0.0.3", "127.0.0.4"])
        handles += await gateway.submit_all(PROMPTS, max_tokens=60)
        names.addresses = None
        await asyncio.sleep(0.2)
        assert len(await ready(admin)) == 3, "a name that cannot be resolved keeps its addresses"
        names.addresses = ["127.0.0.3", "127.0.0.4"]
        await until_ready(admin, ["127.0.0.3", "127.0.0.4"])
        names.addresses = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
        await until_ready(admin, ["127.0.0.2", "127.0.0.3", "127.0.0.4"])
        handles += await gateway.submit_all(PROMPTS, max_tokens=60)
        assert [(await gateway.end_of(handle)).tokens for handle in handles] == 3 * expected
        assert {report.lane for report in await admin.steps()} == {0, 1, 2}
        await admin.assert_all_free()


@run_async
async def test_addresses_of_a_name_follow_given_ones(names: Names) -> None:
    """Each address once, in a stable order; IPv6 in brackets."""
    names.addresses = ["10.0.0.9", "10.0.0.3", "10.0.0.9", "fd00::1"]
    directory, changes = AddressDirectory(["h:1", f"dns:///{NAME}:7"], 60.0), []
    directory.on_change = lambda: changes.append(directory.addresses)
    directory.start()
    await eventually(lambda: bool(changes), "the name is looked up")
    await directory.close()
    assert changes == [["h:1", "10.0.0.3:7", "10.0.0.9:7", "[fd00::1]:7"]]


def test_ranks_have_fixed_addresses() -> None:
    """How many there are is part of the policy."""
    with pytest.raises(ConfigError, match="dns:///workers:1"):
        policy_of(SchedulerSettings(policy="chitu-dp", workers=("dns:///workers:1",)))
