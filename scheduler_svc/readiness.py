"""Whether steps can complete and with which model: one place that the worker link writes, frontends and health read."""

from collections.abc import Callable

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2

Listener = Callable[[], None]


class Readiness:
    """Owner of the service's state towards others. `bundle`: the model bundle's bytes, addressed by `limits.bundle_digest`."""

    def __init__(self) -> None:
        self.serving = False
        self.warming = False
        self.reason = "no worker has loaded a model yet"
        self.limits: common_pb2.ModelLimits | None = None
        self.bundle = b""
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Calls `listener` after every change."""
        self._listeners.append(listener)

    def ready(self, limits: common_pb2.ModelLimits, bundle: bytes) -> None:
        """A worker can run steps."""
        self.limits, self.bundle = limits, bundle
        self._set(serving=True, reason="", warming=False)

    def not_ready(self, reason: str, *, warming: bool = False) -> None:
        """No worker can; `reason` for people. `warming`: one is on the way. The model, once known, stays known."""
        if (self.serving, self.reason, self.warming) != (False, reason, warming):
            self._set(serving=False, reason=reason, warming=warming)

    def state(self) -> engine_pb2.ServiceState:
        """Its wire form."""
        return engine_pb2.ServiceState(
            serving=self.serving, reason=self.reason, limits=self.limits, warming=self.warming
        )

    def _set(self, *, serving: bool, reason: str, warming: bool) -> None:
        self.serving, self.reason, self.warming = serving, reason, warming
        for listener in self._listeners:
            listener()
