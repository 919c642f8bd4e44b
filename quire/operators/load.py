"""Load of a scheduler, and its workers, as JSON values and as tables. Used by `quire load` and `quire workers`."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from protos.inference.v1 import admin_pb2

_DEFAULT_TENANT = "(default)"


def load_json(load: admin_pb2.GetLoadResponse) -> dict[str, Any]:
    """All fields of GetLoad; `gpu` and `cpu` are null until a worker has reported its number of blocks."""
    return {
        "serving": load.serving,
        "draining": load.draining,
        "queues": {"waiting": load.queues.waiting, "running": load.queues.running, "swapped": load.queues.swapped},
        "num_waiting": load.num_waiting,
        "max_waiting": load.max_waiting,
        "num_waiting_tokens": load.num_waiting_tokens,
        "max_waiting_tokens": load.max_waiting_tokens,
        "gpu": _pool_json(load, "gpu"),
        "cpu": _pool_json(load, "cpu"),
        "output_tokens_per_s": round(load.output_tokens_per_s, 3),
        "starts_per_s": round(load.starts_per_s, 3),
        "tenants": {t.tenant: {"waiting": t.num_waiting, "running": t.num_running} for t in load.tenants},
    }


def _pool_json(load: admin_pb2.GetLoadResponse, name: str) -> dict[str, int] | None:
    if not load.HasField(name):
        return None
    pool: admin_pb2.BlockPool = getattr(load, name)
    return {"total": pool.total, "free": pool.free, "cached": pool.cached}


def load_table(load: admin_pb2.GetLoadResponse) -> RenderableType:
    """Waiting, running and free resources; a second table lists tenants if there are others than the default one."""
    table = Table(title=_title(load), title_justify="left", show_header=False)
    for name, text in _rows(load):
        table.add_row(name, text)
    named = [tenant for tenant in load.tenants if tenant.tenant]
    return Group(table, _tenants(load.tenants)) if named else table


def _title(load: admin_pb2.GetLoadResponse) -> str:
    if load.draining:
        return "draining: no more requests are taken"
    return "serving" if load.serving else "not serving: `quire workers` says why"


def _rows(load: admin_pb2.GetLoadResponse) -> list[tuple[str, str]]:
    queues = load.queues
    rows = [
        ("running", f"{queues.running}" + (f", {queues.swapped} swapped out" if queues.swapped else "")),
        ("waiting", f"{load.num_waiting} of {load.max_waiting} requests"),
        ("waiting tokens", f"{load.num_waiting_tokens} of {load.max_waiting_tokens}"),
        ("output", f"{load.output_tokens_per_s:.1f} tokens/s over the last 10 s"),
        ("starts", f"{load.starts_per_s:.2f} requests/s"),
    ]
    for name, what in (("gpu", "device blocks"), ("cpu", "host blocks")):
        if pool := _pool_json(load, name):
            rows.append((what, f"{pool['free']} of {pool['total']} free, {pool['cached']} of these cached"))
    return rows


def _tenants(tenants: Sequence[admin_pb2.TenantLoad]) -> Table:
    table = Table()
    for name in ("tenant", "waiting", "running"):
        table.add_column(name, justify="left" if name == "tenant" else "right")
    for tenant in tenants:
        table.add_row(tenant.tenant or _DEFAULT_TENANT, str(tenant.num_waiting), str(tenant.num_running))
    return table


# --- workers -------------------------------------------------------------------------------------------------------


def workers_json(workers: Sequence[admin_pb2.Worker]) -> list[dict[str, Any]]:
    """All fields of each worker."""
    return [
        {
            "address": worker.address,
            "lane": worker.lane,
            "ready": worker.ready,
            "reason": worker.reason,
            "warming": worker.warming,
            "boot_id": worker.boot_id,
            "epoch": worker.epoch,
            "model": worker.model,
            "num_gpu_blocks": worker.num_gpu_blocks,
            "num_cpu_blocks": worker.num_cpu_blocks,
            "draining": worker.draining,
            "num_running": worker.num_running,
            "num_swapped": worker.num_swapped,
            "num_free_gpu_blocks": worker.num_free_gpu_blocks,
        }
        for worker in workers
    ]


def workers_table(workers: Sequence[admin_pb2.Worker]) -> Table:
    """One row per worker, by number."""
    table = Table()
    for name in ("lane", "address", "state", "running", "model", "epoch", "device blocks", "host blocks"):
        table.add_column(name, overflow="fold")
    for worker in workers:
        running = str(worker.num_running) + (f", {worker.num_swapped} swapped out" if worker.num_swapped else "")
        blocks = f"{worker.num_free_gpu_blocks} of {worker.num_gpu_blocks} free"
        known = [running, worker.model, str(worker.epoch or ""), blocks, str(worker.num_cpu_blocks)]
        table.add_row(str(worker.lane), worker.address, _state(worker), *(known if worker.model else [""] * 5))
    return table


def _state(worker: admin_pb2.Worker) -> str:
    if worker.ready:
        return "drained: no request starts here" if worker.draining else "ready"
    if worker.warming:
        return f"warming up: {worker.reason}"
    return worker.reason or "not reached yet"
