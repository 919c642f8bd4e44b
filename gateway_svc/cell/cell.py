"""One scheduler of a gateway, with everything that the gateway has of it: stream, model, load, stored values, admin channel."""

from collections.abc import Callable, Coroutine
from typing import Any

from gateway_svc.cell.cell_load import CellLoad
from gateway_svc.engine.scheduler_address import AdminChannel, SchedulerAddress
from gateway_svc.engine.scheduler_link import SchedulerLink
from gateway_svc.engine.stored_values import StoredValues
from gateway_svc.generating.cell_model import CellModel
from gateway_svc.settings import GatewaySettings
from svc_common.net import rpc
from svc_common.net.fresh_channel import FreshChannel
from svc_common.net.peers import Peers
from svc_common.net.tls_settings import SCHEDULER
from svc_common.observability.telemetry import Telemetry
from svc_common.tenant_load import TenantLoad


class Cell:
    """Owner of the channels to the scheduler at `scheduler`: HOST:PORT or dns:///NAME:PORT. `live`: see SchedulerLink."""

    def __init__(
        self, settings: GatewaySettings, scheduler: str, peers: Peers, tracing: Telemetry, live: TenantLoad
    ) -> None:
        self.scheduler = scheduler
        self._address = SchedulerAddress(scheduler, settings.scheduler_lookup_s)
        self._channel = FreshChannel(self._address, lambda address: peers.channel(address, SCHEDULER))
        self.link = SchedulerLink(settings, scheduler, rpc.Identity(), self._channel, live)
        self.model = CellModel(settings, self.link, tracing)
        self.values = StoredValues(self._channel)
        self.admin = AdminChannel(
            lambda: self.link.state.admin_address,
            self._address.current,
            lambda address: peers.channel(address, SCHEDULER),
        )
        self.load = CellLoad(self.admin.connected)
        self._address.on_move = self.link.move

    @property
    def not_ready_because(self) -> str:
        """Why it serves no requests, for people; empty if it does."""
        state = self.link.state
        if not (state.attached and state.serving):
            return state.reason or "the scheduler is not serving"
        return "" if self.model.current is not None else self.model.reason

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` after each change of the scheduler's state or model."""

        def hear() -> None:
            self.model.hear()
            on_change()

        self.link.on_state, self.model.on_change = hear, on_change

    def start(self) -> list[Coroutine[Any, Any, None]]:
        """Look the name up from now on, if it is one. Returns what is to run until `close`."""
        self._address.start()
        return [self.link.run(), self.model.run()]

    async def close(self) -> None:
        """Close the channels."""
        await self._address.close()
        await self._channel.close(None)
