"""gRPC health of a service: names that follow its state, and one that does not."""

from collections.abc import Collection, Iterable

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]

LIVENESS = "liveness"
"""Name that is SERVING until the process ends. A supervisor that restarts what is not live must not restart what drains."""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class ServiceHealth:
    """Owner of a process' health; `servicer` is added to its servers."""

    def __init__(self) -> None:
        self.servicer = health_aio.HealthServicer()
        self._names: set[str] = set()
        self._draining = False

    async def start(self) -> None:
        """Report that the process is live."""
        await self.servicer.set(LIVENESS, _SERVING)

    async def set(self, names: Iterable[str], *, serving: bool, absent: Collection[str] = ()) -> None:
        """Set these names, and forget all others but liveness. Those of `absent`, and all after `drain`, are NOT_SERVING."""
        wanted = set(names) - {LIVENESS}
        for name in self._names - wanted:
            await self.servicer.set(name, _UNKNOWN)
        self._names = wanted
        for name in sorted(wanted):
            is_serving = serving and name not in absent and not self._draining
            await self.servicer.set(name, _SERVING if is_serving else _NOT_SERVING)

    async def drain(self) -> None:
        """Report all names but liveness as NOT_SERVING from now on."""
        self._draining = True
        await self.set(self._names, serving=False)
