"""AdminService's adapter methods, over `workers.adapter_registry.AdapterRegistry`."""

from protos.inference.v1 import admin_pb2
from scheduler_svc.adapter_names import AdapterEntry
from scheduler_svc.workers.adapter_registry import AdapterRegistry


class AdapterCalls:
    """The methods that `admin.service` delegates to."""

    def __init__(self, table: AdapterRegistry) -> None:
        self._table = table

    async def load(self, request: admin_pb2.LoadAdapterRequest) -> admin_pb2.LoadAdapterResponse:
        """Implementation of AdminService.LoadAdapter."""
        adapter = await self._table.load(request.name, request.path)
        return admin_pb2.LoadAdapterResponse(adapter=_message(adapter, 0))

    async def unload(self, request: admin_pb2.UnloadAdapterRequest) -> admin_pb2.UnloadAdapterResponse:
        """Implementation of AdminService.UnloadAdapter."""
        await self._table.unload(request.name)
        return admin_pb2.UnloadAdapterResponse()

    def list(self) -> admin_pb2.ListAdaptersResponse:
        """Implementation of AdminService.ListAdapters."""
        return admin_pb2.ListAdaptersResponse(adapters=[_message(*entry) for entry in self._table.all()])


def _message(adapter: AdapterEntry, num_requests: int) -> admin_pb2.Adapter:
    return admin_pb2.Adapter(
        name=adapter.name,
        adapter_id=adapter.adapter_id,
        path=adapter.path,
        num_bytes=adapter.num_bytes,
        rank=adapter.rank,
        num_requests=num_requests,
        unavailable=adapter.problem,
    )
