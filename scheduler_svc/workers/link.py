"""The scheduler's end of WorkerService: connects to a worker's address, opens the stream of steps, and reconnects when it breaks.

Attaching takes three steps: Describe, load (`loading`), and Run to take ownership. A broken stream resumes in
its epoch while the worker's process is the same; otherwise a new epoch starts without rows. `row_planner`
decides what to send.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2, worker_pb2_grpc
from scheduler_svc.policy.choice import PolicyChoice
from scheduler_svc.readiness import WorkerReadiness
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.workers.adapter_registry import AdapterRegistry
from scheduler_svc.workers.cache_agreement import CacheAgreement, CacheCounts
from scheduler_svc.workers.loading import LoadedWorker, WorkerLoader
from svc_common.clock import NS_PER_S
from svc_common.errors import DeadlineExceeded, FailedPrecondition, QuireError, Unavailable
from svc_common.net import rpc
from svc_common.net.peers import Peers
from svc_common.net.tls_settings import WORKER

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.1
_GOODBYE_S = 0.5
_FETCH_S = 60.0
"""Time for the blocks of one sequence."""
_ENDED = "the worker ended the stream"
_SLOWEST_STEPS = 10
"""Multiple of the slowest step so far below which a step is not considered hung."""


class WorkerLostError(Exception):
    """The stream to the worker is gone; `str()` says why. `refused`: the worker rejected what was sent, so its epoch must end."""

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


@dataclass(frozen=True, slots=True)
class OwnedStream:
    """An open Run stream. `resumed`: the worker holds the rows of this epoch, and the results after the last one read.

    `device`: what it computes on, as it reports itself ("cpu", for example).
    """

    epoch: int
    resumed: bool
    worker_boot_id: str
    limits: common_pb2.ModelLimits
    bundle: bytes
    cache: CacheCounts
    device: str


class WorkerLink:
    """Owner of the channel and the Run stream; used only by its `WorkerLane`.

    `agreement`: shared by the links to all workers. `adapters`: what the worker must load before it runs
    steps. `on_news`: called when `take` has something. `results`: what it has. `patience_s`: time to wait for a
    result before the engine counts as hung.
    """

    def __init__(
        self,
        address: str,
        identity: rpc.Identity,
        settings: SchedulerSettings,
        choice: PolicyChoice,
        readiness: WorkerReadiness,
        agreement: CacheAgreement,
        adapters: AdapterRegistry,
        peers: Peers,
    ) -> None:
        self.address = address
        self._peers = peers
        self._identity = identity
        self._settings = settings
        self._readiness = readiness
        self._adapters = adapters
        self._loader = WorkerLoader(address, choice, readiness, agreement)
        self.on_news: Callable[[], None] = lambda: None
        self._channel: grpc.aio.Channel | None = None
        self._stub: worker_pb2_grpc.WorkerServiceStub | None = None
        self._run: grpc.aio.StreamStreamCall[worker_pb2.SchedulerOutputs, worker_pb2.WorkerOutputs] | None = None
        self._reader: asyncio.Task[None] | None = None
        self.results: deque[worker_pb2.WorkerOutputs | WorkerLostError] = deque()
        self.patience_s = settings.step_timeout_s
        self._loaded: LoadedWorker | None = None
        self._epoch = 0
        self._last_step_id = 0

    # --- attaching ------------------------------------------------------------------------------------------------

    async def attach(self) -> OwnedStream:
        """Attach, retrying until it succeeds with pauses that grow to `reconnect_backoff_s`; failures are logged and reported."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                return await self._attach_once()
            except grpc.RpcError as error:
                self._report(rpc.from_rpc_error(error))
            except WorkerLostError as error:
                if error.refused:
                    self._epoch = 0
                self._report(error)
            except (QuireError, TimeoutError) as error:
                self._report(error)
            self.drop()
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, self._settings.reconnect_backoff_s)

    async def _attach_once(self) -> OwnedStream:
        stub = self._connect()
        answer = await stub.Describe(worker_pb2.DescribeRequest(), timeout=self._settings.connect_timeout_s)
        self._identity.agree(answer.identity, f"the worker at {self.address}")
        if answer.state == worker_pb2.WORKER_STATE_FAILED:
            raise Unavailable(f"the worker at {self.address} lost its engine and ends", reason="WORKER_FAILED")
        loaded = self._loaded
        if loaded is None or loaded.boot_id != answer.identity.boot_id:
            loaded = self._loaded = await self._loader.load(stub, answer.identity.boot_id)
            self._epoch = 0
            self._on_step_time(loaded, 0.0)
        owned = await self._own(stub, loaded)
        # Always: adapter ids mean nothing to the worker of a new owner, and a resumed worker may have missed a load.
        await self._adapters.join(self)
        return owned

    def _connect(self) -> worker_pb2_grpc.WorkerServiceStub:
        if self._stub is None:
            self._channel = self._peers.channel(self.address, WORKER)
            self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)  # type: ignore[no-untyped-call]
        return self._stub

    async def _own(self, stub: worker_pb2_grpc.WorkerServiceStub, loaded: LoadedWorker) -> OwnedStream:
        hello = worker_pb2.RunHello(
            identity=self._identity.message(),
            epoch=self._epoch,
            worker_boot_id=loaded.boot_id if self._epoch else "",
            last_step_id=self._last_step_id if self._epoch else 0,
            force=self._settings.force_ownership,
        )
        self._run = stub.Run()
        await self.send(worker_pb2.SchedulerOutputs(hello=hello))
        async with asyncio.timeout(self._settings.connect_timeout_s):
            first = await self._read_welcome()
        if not first.HasField("welcome"):
            raise FailedPrecondition(f"the worker at {self.address} did not begin with a welcome", reason="NO_WELCOME")
        welcome = first.welcome
        self._identity.agree(welcome.identity, f"the worker at {self.address}")
        if not welcome.resumed:
            self._last_step_id = 0
        self._epoch = welcome.epoch
        self.results = deque()
        self._reader = asyncio.create_task(self._read_results(self.results), name="worker-results")
        return OwnedStream(
            epoch=welcome.epoch,
            resumed=welcome.resumed,
            worker_boot_id=loaded.boot_id,
            limits=loaded.limits,
            bundle=loaded.bundle,
            cache=loaded.cache,
            device=loaded.device,
        )

    def _report(self, error: Exception) -> None:
        text = self._explain(error)
        if text != self._readiness.reason:
            log.warning("%s", text)
        self._readiness.not_ready(text)

    def _explain(self, error: Exception) -> str:
        if isinstance(error, TimeoutError | DeadlineExceeded) or (
            isinstance(error, Unavailable) and error.reason == "UNAVAILABLE"
        ):
            return (
                f"the worker at {self.address} cannot be reached ({error or 'no answer'}): start it with "
                "`quire serve worker --model MODEL --port PORT` or give its address with --worker; trying again"
            )
        return f"the worker at {self.address} cannot serve: {error}"

    # --- adapters -------------------------------------------------------------------------------------------------

    async def load_adapter(self, adapter_id: int, path: str) -> tuple[int, int]:
        """Load an adapter at the worker; returns (bytes, rank). Raises the worker's typed error."""
        request = worker_pb2.LoadAdapterRequest(adapter_id=adapter_id, path=path)
        try:
            answer = await self._connect().LoadAdapter(request)
        except grpc.RpcError as error:
            raise rpc.from_rpc_error(error) from None
        return answer.num_bytes, answer.rank

    async def unload_adapter(self, adapter_id: int) -> None:
        """Unload an adapter at the worker. Raises the worker's typed error."""
        try:
            await self._connect().UnloadAdapter(worker_pb2.UnloadAdapterRequest(adapter_id=adapter_id))
        except grpc.RpcError as error:
            raise rpc.from_rpc_error(error) from None

    # --- blocks of other workers ------------------------------------------------------------------------------------

    async def fetch_blocks(self, request: worker_pb2.FetchBlocksRequest) -> worker_pb2.FetchBlocksResponse:
        """Have the worker fetch blocks of another one. Raises its typed error."""
        try:
            answer: worker_pb2.FetchBlocksResponse = await self._connect().FetchBlocks(request, timeout=_FETCH_S)
        except grpc.RpcError as error:
            raise rpc.from_rpc_error(error) from None
        return answer

    async def drop_image(self, request: worker_pb2.DropImageRequest) -> None:
        """Have the worker drop an image; one that cannot be reached loses it with its epoch."""
        with contextlib.suppress(grpc.RpcError):
            await self._connect().DropImage(request, timeout=self._settings.connect_timeout_s)

    # --- the stream -----------------------------------------------------------------------------------------------

    async def send(self, message: worker_pb2.SchedulerOutputs) -> None:
        """Write one message. Raises WorkerLostError if the stream is gone."""
        assert self._run is not None
        try:
            await self._run.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise _lost(error) from None

    def take(self) -> worker_pb2.WorkerOutputs | None:
        """The next result, or None if there is none yet. Raises WorkerLostError if the stream is gone."""
        if not self.results:
            return None
        message = self.results.popleft()
        if isinstance(message, WorkerLostError):
            raise message
        if message.epoch == self._epoch:
            self._last_step_id = message.step_id
        assert self._loaded is not None
        t = message.timings
        took_s = (t.cache_ns + t.prepare_ns + t.model_ns + t.sample_ns) / NS_PER_S
        if took_s > self._loaded.slowest_step_s:
            self._on_step_time(self._loaded, took_s)
        return message

    def _on_step_time(self, loaded: LoadedWorker, took_s: float) -> None:
        """Wait at least `step_timeout_s`, and ten times the slowest step so far, including the largest one measured by
        the profile.

        A process that stopped or lost its network is noticed by gRPC's keepalive instead, within seconds.
        """
        loaded.slowest_step_s = max(loaded.slowest_step_s, took_s)
        self.patience_s = max(self._settings.step_timeout_s, _SLOWEST_STEPS * loaded.slowest_step_s)

    async def _read_results(self, results: deque[worker_pb2.WorkerOutputs | WorkerLostError]) -> None:
        assert self._run is not None
        try:
            while isinstance(message := await self._run.read(), worker_pb2.WorkerOutputs):
                results.append(message)
                self.on_news()
            results.append(WorkerLostError(_ENDED))
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            results.append(_lost(error))
        self.on_news()

    async def _read_welcome(self) -> worker_pb2.WorkerOutputs:
        assert self._run is not None
        try:
            message = await self._run.read()
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise _lost(error) from None
        if not isinstance(message, worker_pb2.WorkerOutputs):
            raise WorkerLostError(_ENDED)
        return message

    def forget_epoch(self) -> None:
        """Make the next attach request a new epoch, because what the worker holds is not to be trusted."""
        self._epoch = 0

    def drop(self) -> None:
        """Close the stream and discard results not taken; the channel stays open."""
        self.results = deque()
        self._adapters.leave(self)
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        if self._run is not None:
            self._run.cancel()
            self._run = None

    async def close(self) -> None:
        """Say goodbye, so that the worker's next owner need not wait for the lease to expire, and close the channel."""
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                await self._say_goodbye()
        self.drop()
        if self._channel is not None:
            await self._channel.close(None)

    async def _say_goodbye(self) -> None:
        if self._run is not None and self._reader is not None:
            await self._run.write(worker_pb2.SchedulerOutputs(goodbye=worker_pb2.RunGoodbye()))
            await self._run.done_writing()
            # Not `await reader`: the goodbye is sent even if the reader fails or is cancelled.
            await asyncio.wait({self._reader})


def _lost(error: BaseException) -> WorkerLostError:
    if not isinstance(error, grpc.RpcError):
        return WorkerLostError(str(error) or type(error).__name__)
    known = rpc.from_rpc_error(error)
    refused = rpc.is_from_peer(error) and not isinstance(known, Unavailable)
    return WorkerLostError(f"{known.status}: {known.message}", refused=refused)
