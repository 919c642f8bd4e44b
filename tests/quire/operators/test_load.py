"""`quire load`, `quire workers` and `quire drain` against a running stack, and the forms of their answers."""

import io
import json

from rich.console import Console

from protos.inference.v1 import admin_pb2
from quire.local_stack.stack import LocalStack
from quire.operators import load as report
from quire.operators.admin import AdminClient
from tests.support.stack.commands import quire_here


def _text(renderable: object) -> str:
    out = io.StringIO()
    Console(file=out, width=140).print(renderable)
    return out.getvalue()


def test_load_and_workers_through_the_gateways_relay(simulated_stack: LocalStack) -> None:
    """Messages pass the relay as bytes; the command prints one JSON object."""
    with AdminClient(simulated_stack.admin_address) as admin:
        load, workers = admin.load(), admin.workers()
    values = report.load_json(load)
    assert values["serving"] and not values["draining"] and values["gpu"]["free"] == values["gpu"]["total"] > 0
    assert "serving" in _text(report.load_table(load))
    [worker] = report.workers_json(workers)
    assert worker["ready"] and worker["model"] == "simulated" and worker["num_gpu_blocks"] > 0
    result = quire_here("load", "--admin", simulated_stack.admin_address, "--json")
    assert json.loads(result.stdout)["max_waiting"] == 4096


def test_drain_and_undo(simulated_stack: LocalStack) -> None:
    """What the load says of it follows."""
    with AdminClient(simulated_stack.admin_address) as admin:
        assert admin.drain() == 0
        assert "draining" in _text(report.load_table(admin.load()))
        admin.drain(undo=True)
        assert admin.load().serving


def test_tables_name_tenants_and_why_a_worker_is_away() -> None:
    """What is not known has no numbers."""
    load = admin_pb2.GetLoadResponse(
        tenants=[admin_pb2.TenantLoad(), admin_pb2.TenantLoad(tenant="acme", num_running=3)]
    )
    text = _text(report.load_table(load))
    assert "not serving" in text and "acme" in text and "(default)" in text and "device blocks" not in text
    away = admin_pb2.Worker(address="h:1", lane=1, reason="it cannot be reached")
    warming = admin_pb2.Worker(address="h:2", warming=True, reason="loads weights")
    text = _text(report.workers_table([away, warming]))
    assert "it cannot be reached" in text and "warming up: loads weights" in text
