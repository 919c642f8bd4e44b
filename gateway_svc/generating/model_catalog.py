"""Models served by this gateway, over all its schedulers: which model a request names, and which scheduler runs it."""

from collections.abc import Sequence

from gateway_svc.calls import Call
from gateway_svc.generating.cell_model import CellModel, ServedModel, model_not_found
from gateway_svc.requests.engine_request import EngineRequest
from svc_common.errors import QuireError


class ModelCatalog:
    """The models of all schedulers. Of two that serve a model of one name, the first runs its requests.

    `aliases`: further names of the first scheduler's model, which also serves requests that name none.
    """

    def __init__(self, cells: Sequence[CellModel], aliases: Sequence[str]) -> None:
        self._cells = cells
        self.aliases = aliases

    @property
    def served(self) -> list[ServedModel]:
        """Models and their adapters, each name once; empty before the first is loaded."""
        found: dict[str, ServedModel] = {}
        for cell in self._cells:
            for model in cell.served:
                found.setdefault(model.name, model)
        return list(found.values())

    @property
    def named(self) -> list[tuple[str, ServedModel]]:
        """The same under all names, aliases last."""
        first = self._cells[0].current
        aliases = [] if first is None else [(alias, first) for alias in self.aliases]
        return [*((model.name, model) for model in self.served), *aliases]

    def get(self, name: str) -> ServedModel:
        """Return the model or adapter of that name (empty, or one of `aliases` = the model of the first scheduler).

        Raises NotFound, or Unavailable while the model of a scheduler is not known, which may be the one.
        """
        cell = self.cell(name)
        if cell.current is None:
            raise cell.unavailable()
        found = cell.find(name)
        if found is not None:
            return found
        if name in ("", *self.aliases):
            return cell.current
        raise model_not_found(name, [*(model.name for model in self.served), *self.aliases])

    async def wait(self, name: str, call: Call) -> ServedModel:
        """Like `get`, but wait for the first model of each scheduler that may serve it; see `CellModel.wait_ready`."""
        while (cell := self.cell(name)).current is None:
            await cell.wait_ready(call)
        return self.get(name)

    def cell(self, name: str) -> CellModel:
        """Return the cell that runs requests for that name, as far as is known now."""
        for cell in self._cells:
            if cell.find(name) is not None:
                return cell
        if name in ("", *self.aliases):
            return self._cells[0]
        return next((cell for cell in self._cells if cell.current is None), self._cells[0])

    def cells_for_resuming(self, tenant: str, request_id: str) -> Sequence[CellModel]:
        """Return all, in the order in which their schedulers are to be asked for a request."""

        def rank(cell: CellModel) -> tuple[bool, bool]:
            return cell.link.requests.find(tenant, request_id) is None, not cell.link.state.attached

        return sorted(self._cells, key=rank)

    def cancel(self, tenant: str, request_id: str, error: QuireError) -> None:
        """Cancel a request by its public id, wherever it runs; see `SchedulerLink.cancel`."""
        links = [cell.link for cell in self._cells]
        holding = [link for link in links if link.requests.find(tenant, request_id) is not None]
        for link in holding or links:
            link.cancel(tenant, request_id, error)

    def running(self, tenant: str, request_id: str) -> EngineRequest | None:
        """Return the live request of this public id at this gateway, if any."""
        found = (cell.link.requests.find(tenant, request_id) for cell in self._cells)
        return next((request for request in found if request is not None), None)

    def cancel_all(self, tenant: str, error: QuireError) -> int:
        """Cancel all requests of a tenant at this gateway; returns how many were running."""
        links = [cell.link for cell in self._cells]
        ids = [
            each.request_id
            for link in links
            for each in link.requests
            if each.submit.tenant == tenant and not each.is_over
        ]
        for request_id in ids:
            self.cancel(tenant, request_id, error)
        return len(ids)
