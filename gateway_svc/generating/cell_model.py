"""The model of one scheduler: limits from the scheduler, text model from the bundle, fetched by digest and cached.

One base model at a time, and its adapters under their own names. Requests that arrive before the first is
loaded wait for it.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gateway_svc.calls import Call
from gateway_svc.checks.validation import SamplingDefaults
from gateway_svc.engine.scheduler_link import SchedulerLink
from gateway_svc.settings import GatewaySettings
from gateway_svc.text.text_model import TextModel
from gateway_svc.waiting import NO_MODEL, SCHEDULER_AWAY, Waiting
from protos.common.v1 import common_pb2
from svc_common.errors import FailedPrecondition, NotFound, QuireError, Unavailable
from svc_common.observability.telemetry import Telemetry

log = logging.getLogger(__name__)

MAX_CACHED = 4
RETRY_S = 0.5
RETRY_AFTER_S = 1.0
KNOWN_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Everything the gateway needs to serve one model.

    `cell`: what its scheduler serves. `adapter`: name of the adapter to use, empty = none. `name`: what it is served under.
    """

    limits: common_pb2.ModelLimits
    text: TextModel
    defaults: SamplingDefaults
    cell: "CellModel"
    adapter: str = ""
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.adapter or self.limits.model)

    @property
    def base_model(self) -> str:
        """Name of the adapter's base model; empty if this is not an adapter."""
        return self.limits.model if self.adapter else ""


class CellModel:
    """The current model of the scheduler at the other end of `link`, and bundles fetched before.

    `on_change` is called after each change of the model. `reason`: why there is none, for people.
    """

    def __init__(self, settings: GatewaySettings, link: SchedulerLink, tracing: Telemetry) -> None:
        self.link = link
        self._settings = settings
        self._tracing = tracing
        self._texts: dict[str, TextModel] = {}
        self._current: ServedModel | None = None
        self._adapters: tuple[str, ...] = ()
        self._wanted: common_pb2.ModelLimits | None = None
        self._changed = asyncio.Event()
        self._ready = asyncio.Event()
        self._heard = asyncio.Event()
        self._waiting: set[Waiting] = set()
        self._is_away = True
        self._is_warming = False
        self.reason = "the scheduler has not been reached yet"
        self.on_change: Callable[[], None] = lambda: None

    # --- for requests ------------------------------------------------------------------------------------------------

    @property
    def current(self) -> ServedModel | None:
        """Model served now; None before the first is loaded."""
        return self._current

    @property
    def served(self) -> list[ServedModel]:
        """The model and its adapters; empty before the first is loaded."""
        current = self._current
        return [] if current is None else [current, *(replace(current, adapter=name) for name in self._adapters)]

    def find(self, name: str) -> ServedModel | None:
        """Return the model or adapter of that name; None = it is not served here, or not yet."""
        current = self._current
        if current is None or name == current.name:
            return current
        return replace(current, adapter=name) if name in self._adapters else None

    def get(self, name: str) -> ServedModel:
        """Like `find`. Raises NotFound."""
        found = self.find(name)
        if found is None:
            raise model_not_found(name, [model.name for model in self.served])
        return found

    async def wait_ready(self, call: Call) -> None:
        """Wait for the first model, at most until the call's deadline. Raises Unavailable without one.

        While a worker is loading a model the wait lasts up to `warm_up_s`, otherwise up to `unreachable_s`.
        The wait is a child span of the call's.
        """
        if self._current is None:
            await self._wait(min(call.remaining_s, self._settings.warm_up_s), Waiting(self._tracing, call.span))
        if self._current is None:
            raise self.unavailable()

    async def _wait(self, timeout_s: float, waiting: Waiting) -> None:
        if len(self._waiting) >= self._settings.max_waiting_requests:
            raise self.unavailable()
        self._waiting.add(waiting)
        self._explain(waiting)
        try:
            left_s = timeout_s
            while left_s > 0 and not self._ready.is_set():
                patience_s = min(left_s, self._settings.unreachable_s)
                left_s -= patience_s
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(patience_s):
                        await self._ready.wait()
                if not self._is_warming:
                    return
        finally:
            self._waiting.remove(waiting)
            waiting.over()

    def _explain(self, waiting: Waiting) -> None:
        waiting.because(SCHEDULER_AWAY if self._is_away else NO_MODEL, self.reason)

    def unavailable(self) -> Unavailable:
        """The error of a request that needs a model while there is none."""
        return Unavailable(self.reason, reason="NO_MODEL", retry_after_s=RETRY_AFTER_S)

    # --- from the scheduler link -------------------------------------------------------------------------------------

    def hear(self) -> None:
        """Take over the state of the link: the model and adapters that the scheduler serves, or why it serves none."""
        state = self.link.state
        limits, reason = state.limits, state.reason
        self._is_away = not state.attached
        self._is_warming = state.warming or state.serving
        self._adapters = tuple(state.adapters)
        self._heard.set()
        if limits is None or not limits.bundle_digest:
            self.reason = reason or "no worker has loaded a model yet"
        elif limits != self._wanted:
            self._wanted = limits
            self.reason = f"the tokenizer of model {limits.model} is being loaded"
            self._changed.set()
        for waiting in self._waiting:
            self._explain(waiting)

    async def until_known(self, adapter: str) -> None:
        """Return once the scheduler lists this adapter, or after KNOWN_WITHIN_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_WITHIN_S):
                while adapter not in self._adapters:
                    self._heard.clear()
                    await self._heard.wait()

    async def run(self) -> None:
        """Load the wanted model whenever it changes, until cancelled; a failed bundle fetch is retried."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._load(self._wanted)
            except QuireError as error:
                self.reason = f"the model's tokenizer cannot be had from the scheduler: {error.message}"
                log.warning("%s", self.reason)
                self._changed.set()
                await asyncio.sleep(RETRY_S)

    async def _load(self, limits: common_pb2.ModelLimits | None) -> None:
        if limits is None:
            return
        text = self._texts.get(limits.bundle_digest)
        if text is None:
            data = await self.link.fetch_bundle(limits.bundle_digest)
            _check_digest(data, limits.bundle_digest)
            text = await asyncio.to_thread(TextModel.from_bundle, data)
            self._texts[limits.bundle_digest] = text
            while len(self._texts) > MAX_CACHED:
                del self._texts[next(iter(self._texts))]
        defaults = SamplingDefaults.from_generation_config(text.generation_config)
        self._current = ServedModel(limits, text, defaults, self)
        self._ready.set()
        self.on_change()


def model_not_found(name: str, served: Sequence[str]) -> NotFound:
    """The error for a model that is not among those served."""
    names = ", ".join(served)
    return NotFound(
        f"there is no model {name[:128]!r} here; served: {names}",
        reason="MODEL_NOT_FOUND",
        metadata={"model": name[:128], "served": names[:1024]},
        resource_type="model",
        resource_name=name[:128],
    )


def _check_digest(data: bytes, digest: str) -> None:
    actual = hashlib.sha256(data).hexdigest()
    if actual != digest:
        raise FailedPrecondition(f"the bundle has digest {actual}, asked for was {digest}", reason="BUNDLE_DIGEST")
