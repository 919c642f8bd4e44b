"""GET /v1/loads, in the form of SGLang and its Model Gateway, and GET /load, in vLLM's form: the cell's load."""

import datetime
from collections.abc import Callable, Sequence
from typing import Any

from starlette.routing import Route

from gateway_svc.calls import Call
from gateway_svc.cell.cell_load import CellLoad, CellReading
from gateway_svc.engine.scheduler_link import LinkState
from gateway_svc.http.endpoint import Doorman, HttpRequest
from gateway_svc.http.io import Reply
from svc_common.errors import InvalidArgument
from svc_common.version import VERSION


class LoadRoutes:
    """The two routes. A cell is one load: its scheduler has one queue for all workers. `state()`: of the link to it."""

    def __init__(self, cell: CellLoad, state: Callable[[], LinkState]) -> None:
        self._cell = cell
        self._state = state

    def routes(self, door: Doorman) -> Sequence[Route]:
        """Make the routes."""
        return [door.route("GET", "/v1/loads", self.loads), door.route("GET", "/load", self.load)]

    async def loads(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer with the load as that of rank 0. `include` is of no effect: there are no further sections."""
        if (rank := http.query.get("dp_rank", "0")) != "0":
            raise InvalidArgument.field("dp_rank", f"is {rank[:20]!r}; a cell is one load, of rank 0")
        reading = await self._cell.read()
        values = scheduler_load(reading, block_size_of(self._state()))
        if reading.load.HasField("queued_work_s"):
            values["queued_work_s"] = reading.load.queued_work_s
        await reply.json({**about(reading), "loads": [values], "age_s": reading.age_s})

    async def load(self, http: HttpRequest, call: Call, reply: Reply) -> None:
        """Answer with the number of requests that wait or run."""
        reading = await self._cell.read()
        await reply.json({"server_load": reading.num_running + reading.num_waiting, "age_s": reading.age_s})


def about(reading: CellReading) -> dict[str, Any]:
    """What SGLang's form says besides the loads: the time at which the scheduler was asked, release, number of ranks."""
    asked = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=reading.age_s)
    return {"timestamp": asked.isoformat(), "version": VERSION, "dp_rank_count": 1}


def block_size_of(state: LinkState) -> int:
    """Tokens of a KV block; 0 before the model is known."""
    return state.limits.block_size if state.limits is not None else 0


def scheduler_load(reading: CellReading, block_size: int) -> dict[str, Any]:
    """SGLang's names of the values, which its HTTP form and the gRPC contracts of its Model Gateway share.

    Tokens are those of whole blocks. Waiting tokens count cached prefixes too, which only admission looks up.
    """
    load = reading.load
    return {
        "dp_rank": 0,
        "num_running_reqs": reading.num_running,
        "num_waiting_reqs": reading.num_waiting,
        "num_total_reqs": reading.num_running + reading.num_waiting,
        "num_used_tokens": (load.gpu.total - load.gpu.free) * block_size,
        "max_total_num_tokens": load.gpu.total * block_size,
        "token_usage": reading.kv_usage,
        "gen_throughput": load.output_tokens_per_s,
        "cache_hit_rate": reading.hit_rate,
        "utilization": min(1.0, reading.num_running / load.max_running) if load.max_running else 0.0,
        "max_running_requests": load.max_running,
        "num_waiting_uncached_tokens": load.num_waiting_tokens,
    }
