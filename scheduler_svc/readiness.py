"""Whether steps can complete, and with which model: written by the step loop and the worker links, read by
gateway streams and health checks."""

from collections.abc import Callable
from dataclasses import dataclass

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from svc_common.errors import Unavailable

Listener = Callable[[], None]

_DRAINING = "the scheduler takes no more requests: it is being drained"
_RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class WorkerReadiness:
    """State of one worker as its link reports it. `reason`: why it runs no steps; "" = it does, or waits for other workers."""

    _readiness: "Readiness"
    reason: str = ""
    warming: bool = False

    def not_ready(self, reason: str, *, warming: bool = False) -> None:
        """Report that the worker runs no steps; `reason` is for people. `warming`: it is loading or profiling."""
        self.reason, self.warming = reason, warming
        self._readiness.heard()

    def ready(self) -> None:
        """Report that the worker can run steps."""
        self.reason, self.warming = "", False
        self._readiness.heard()

    def known_bundle(self, digest: str) -> bytes | None:
        """The model bundle with that digest, if another worker has delivered it already."""
        limits = self._readiness.limits
        return self._readiness.bundle if limits is not None and limits.bundle_digest == digest else None


class Readiness:
    """The service's state as others see it. `serving`: steps can complete.

    `draining`: an operator stopped the intake of requests; accepted ones go on. `bundle`: the model bundle's
    bytes, addressed by `limits.bundle_digest`.
    """

    def __init__(self) -> None:
        self.serving = False
        self.warming = False
        self.draining = False
        self.reason = "no worker has loaded a model yet"
        self.limits: common_pb2.ModelLimits | None = None
        self.bundle = b""
        self.adapters: list[str] = []
        self._listeners: list[Listener] = []
        self._workers: list[WorkerReadiness] = []

    def worker(self) -> WorkerReadiness:
        """Add a worker; its link writes to the returned record."""
        self._workers.append(WorkerReadiness(self))
        return self._workers[-1]

    def listen(self, listener: Listener) -> None:
        """Call `listener` after every change."""
        self._listeners.append(listener)

    def ready(self, limits: common_pb2.ModelLimits, bundle: bytes) -> None:
        """Report that steps can complete, with that model."""
        self.limits, self.bundle = limits, bundle
        self._set(serving=True, reason="", warming=False)

    def not_ready(self, reason: str, *, warming: bool = False) -> None:
        """Report that no worker can run steps; `reason` is for people. `warming`: one is loading. A known model stays known."""
        if (self.serving, self.reason, self.warming) != (False, reason, warming):
            self._set(serving=False, reason=reason, warming=warming)

    @property
    def is_open(self) -> bool:
        """True if requests are accepted and can be served: what health checks report."""
        return self.serving and not self.draining

    def drain(self, *, on: bool) -> None:
        """Stop accepting requests, or accept them again."""
        if self.draining != on:
            self.draining = on
            self._tell()

    def check_open(self) -> None:
        """Raise Unavailable while no new requests are accepted."""
        if self.draining:
            raise Unavailable(_DRAINING, reason="DRAINING", retry_after_s=_RETRY_AFTER_S)

    def name_adapters(self, names: list[str]) -> None:
        """Set the adapters that requests may name."""
        self.adapters = names
        self._tell()

    def heard(self) -> None:
        """Update the reason after a change of a worker's state. Ignored while steps complete."""
        if not self.serving:
            self.stop()

    def stop(self) -> None:
        """Report that no worker runs steps, with the reasons of the workers' links."""
        away = [worker for worker in self._workers if worker.reason]
        if away:
            self.not_ready("; ".join(w.reason for w in away), warming=any(w.warming for w in away))

    def state(self) -> engine_pb2.ServiceState:
        """The state as a message."""
        return engine_pb2.ServiceState(
            serving=self.is_open,
            reason=self.reason or (_DRAINING if self.draining else ""),
            limits=self.limits,
            warming=self.warming,
            adapters=self.adapters,
        )

    def _set(self, *, serving: bool, reason: str, warming: bool) -> None:
        self.serving, self.reason, self.warming = serving, reason, warming
        self._tell()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()
