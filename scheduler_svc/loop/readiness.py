"""Whether steps can complete and with which model: one place that the step loop and the workers' links write, frontends and health
read."""

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
    """What the link to one worker says of it. `reason`: why it runs no steps, "" = it does, or waits for the others."""

    _readiness: "Readiness"
    reason: str = ""
    warming: bool = False

    def not_ready(self, reason: str, *, warming: bool = False) -> None:
        """It runs no steps; `reason` for people. `warming`: it is on the way."""
        self.reason, self.warming = reason, warming
        self._readiness.heard()

    def ready(self) -> None:
        """Nothing speaks against it any more."""
        self.reason, self.warming = "", False
        self._readiness.heard()

    def known_bundle(self, digest: str) -> bytes | None:
        """The model bundle of that digest, if another worker gave it already."""
        limits = self._readiness.limits
        return self._readiness.bundle if limits is not None and limits.bundle_digest == digest else None


class Readiness:
    """Owner of the service's state towards others. `serving`: steps can complete. `draining`: an operator wants no more requests
    here; those that are here go on. `bundle`: the model bundle's bytes, addressed by `limits.bundle_digest`."""

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
        """What one more worker's link writes to."""
        self._workers.append(WorkerReadiness(self))
        return self._workers[-1]

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

    @property
    def is_open(self) -> bool:
        """Whether requests can be served and are taken: what load balancers go by."""
        return self.serving and not self.draining

    def drain(self, *, on: bool) -> None:
        """Takes no more requests, or takes them again."""
        if self.draining != on:
            self.draining = on
            self._tell()

    def check_open(self) -> None:
        """Unavailable while no new requests are taken."""
        if self.draining:
            raise Unavailable(_DRAINING, reason="DRAINING", retry_after_s=_RETRY_AFTER_S)

    def name_adapters(self, names: list[str]) -> None:
        """Adapters that requests may name from now on."""
        self.adapters = names
        self._tell()

    def heard(self) -> None:
        """A worker's link has news. While steps run all the same, they are for the log only."""
        if not self.serving:
            self.stop()

    def stop(self) -> None:
        """No worker runs steps; why, their links have said."""
        away = [worker for worker in self._workers if worker.reason]
        if away:
            self.not_ready("; ".join(w.reason for w in away), warming=any(w.warming for w in away))

    def state(self) -> engine_pb2.ServiceState:
        """Its wire form."""
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
