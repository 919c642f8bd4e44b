"""One worker as the step loop uses it: sends plans and takes results in order, and continues after a reconnect.

If the core has one worker per lane there is a `WorkerLane` for each, else one for all lanes. Knows no queues.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.readiness import WorkerReadiness
from scheduler_svc.worker_values import WorkerResult
from scheduler_svc.workers.link import OwnedStream, WorkerLink, WorkerLostError
from scheduler_svc.workers.row_planner import RowPlanner, SamplingLookup
from svc_common import wire_arrays
from svc_common.clock import NS_PER_S, monotonic_ns
from svc_common.errors import InvalidArgument

log = logging.getLogger(__name__)

_MAX_BREAKS = 2
_NEW_EPOCH_STATUSES = frozenset({"UNAVAILABLE", "INVALID_ARGUMENT"})


@dataclass(frozen=True, slots=True)
class Sent:
    """A plan in flight, as it was sent."""

    plan: StepPlan
    message: worker_pb2.SchedulerOutputs


class WorkerLane:
    """Owner of the link to one worker, of its row table (`planner`), and of `in_flight`: plans without a result.

    `owned`: what the worker reported when last attached. `is_here`: its stream is open. `is_void`: it holds
    nothing of use, because nothing was begun yet or its sequences were requeued. While it is away, plans for
    it are kept in `in_flight`. `lost_because`: the reason of its last loss. `is_draining`: no request starts on it. `is_gone`: its
    address is no worker's any more.
    """

    def __init__(self, number: int, link: WorkerLink, readiness: WorkerReadiness) -> None:
        self.number = number
        self.owned: OwnedStream | None = None
        self.planner = RowPlanner(0)
        self.in_flight: deque[Sent] = deque()
        self.is_here = False
        self.is_void = True
        self.is_draining = self.is_gone = False
        self.lost_because = ""
        self.since_ns = monotonic_ns()
        self._link = link
        self._readiness = readiness
        self._attaching: asyncio.Task[OwnedStream] | None = None
        self._num_breaks = 0

    @property
    def address(self) -> str:
        """The worker's address."""
        return self._link.address

    @property
    def boot_id(self) -> str:
        """Boot id of the worker's process; "" before it was attached."""
        return self.owned.worker_boot_id if self.owned is not None else ""

    @property
    def reason(self) -> str:
        """Why the worker runs no steps, for people; empty = it does, or waits for other workers."""
        return self._readiness.reason

    @property
    def is_warming(self) -> bool:
        """True while the worker loads."""
        return self._readiness.warming

    def listen(self, on_news: Callable[[], None]) -> None:
        """Call `on_news` when there is something to take."""
        self._link.on_news = on_news

    def has_news(self) -> bool:
        """True if `take_result` or `take_ownership` has something. Results are not counted while the worker is being attached."""
        return (self.is_here and bool(self._link.results)) or (self._attaching is not None and self._attaching.done())

    @property
    def seconds(self) -> float:
        """Seconds since the loss; or, if connected, since its last result or its first plan after being idle."""
        return (monotonic_ns() - self.since_ns) / NS_PER_S

    def patience_left_s(self) -> float:
        """Seconds until a missing result counts as a loss of the worker."""
        return self._link.patience_s - self.seconds

    # --- connecting -----------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Start attaching in the background, unless attached or attaching; the link calls `on_news` when it is done."""
        if self._attaching is None and not self.is_here:
            self._attaching = asyncio.create_task(self._link.attach(), name=f"attach-worker-{self.number}")
            self._attaching.add_done_callback(lambda task: self._link.on_news())

    def take_ownership(self) -> OwnedStream | None:
        """The ownership once attached, else None. The caller must call `resume` or `begin` next."""
        if self._attaching is None or not self._attaching.done():
            return None
        attaching, self._attaching = self._attaching, None
        self.owned, self.is_here = attaching.result(), True
        self._readiness.ready()
        self.since_ns = monotonic_ns()
        log.info("worker %s: epoch %d, resumed: %s", self.address, self.owned.epoch, self.owned.resumed)
        return self.owned

    async def resume(self) -> None:
        """Resend the plans in flight to a worker that kept its rows; it repeats their results. Raises WorkerLostError."""
        for sent in self.in_flight:
            await self._link.send(sent.message)

    def begin(self, num_rows: int) -> None:
        """Start with an empty row table of that size, in the worker's new epoch."""
        assert self.owned is not None
        self.planner = RowPlanner(num_rows, epoch=self.owned.epoch)
        self._num_breaks = 0
        self.is_void = False

    @property
    def is_fresh(self) -> bool:
        """True if connected and nothing was sent in its epoch yet."""
        return self.is_here and (self.is_void or not self.planner.last_step_id)

    # --- steps ----------------------------------------------------------------------------------------------------

    async def send(self, plan: StepPlan, sampling: SamplingLookup) -> None:
        """Send a plan, or keep it until the worker reconnects. On WorkerLostError it is kept as well."""
        sent = Sent(plan, self.planner.encode(plan, sampling))
        if self.is_here and not self.in_flight:
            self.since_ns = monotonic_ns()
        self.in_flight.append(sent)
        if self.is_here:
            await self._link.send(sent.message)

    def follow(self, plan: StepPlan) -> None:
        """Expect the result of a granted step that the worker has begun."""
        self.in_flight.append(Sent(plan, self.planner.follow(plan)))

    async def revoke(self) -> None:
        """Tell the worker to begin no further granted step. Raises WorkerLostError."""
        if self.is_here:
            await self._link.send(worker_pb2.SchedulerOutputs(revocation=worker_pb2.GrantRevocation()))

    def take_result(self) -> tuple[StepPlan, WorkerResult] | None:
        """The oldest plan in flight with its result; None if there is none yet. Raises WorkerLostError if none will come."""
        result = None
        while result is None:
            message = self._link.take()
            if message is None:
                self._check_patience()
                return None
            try:
                result = self.planner.decode(message)
            except InvalidArgument as error:
                self._link.forget_epoch()
                raise WorkerLostError(f"a result cannot be read: {error}") from None
        if result.error is not None:
            self._check_rows(result.result.step, result.error)
        self._num_breaks = 0
        self.since_ns = monotonic_ns()
        return self.in_flight.popleft().plan, result

    def _check_rows(self, step: int, error: common_pb2.ErrorStatus) -> None:
        """Raise WorkerLostError after errors that leave the worker's rows unlike the planner's."""
        if error.status in _NEW_EPOCH_STATUSES:
            self._link.forget_epoch()
            raise WorkerLostError(f"step {step}: {error.message}")

    def _check_patience(self) -> None:
        if self.in_flight and self.patience_left_s() <= 0:
            raise WorkerLostError(f"no result for {self._link.patience_s:g} s")

    # --- blocks of other workers ------------------------------------------------------------------------------------

    def fetch(
        self, image: str, num_before: int, source: "WorkerLane", blocks: Sequence[int]
    ) -> asyncio.Task[worker_pb2.FetchBlocksResponse]:
        """Begin to have the worker append blocks of another one to an image; the link calls `on_news` when it is done.

        The result may be a QuireError.
        """
        request = worker_pb2.FetchBlocksRequest(
            epoch=self.planner.epoch,
            image=image,
            num_before=num_before,
            source=source.address,
            source_epoch=source.planner.epoch,
            source_boot_id=source.boot_id,
            block_ids=wire_arrays.pack(blocks),
        )
        fetching = asyncio.create_task(self._link.fetch_blocks(request), name=f"fetch-blocks-{self.number}")
        fetching.add_done_callback(lambda task: self._link.on_news())
        return fetching

    async def drop_image(self, image: str, epoch: int) -> None:
        """Have the worker drop an image of that epoch."""
        await self._link.drop_image(worker_pb2.DropImageRequest(image=image, epoch=epoch))

    # --- losing ---------------------------------------------------------------------------------------------------

    def lose(self, error: WorkerLostError) -> None:
        """Handle a broken stream. Whether the steps in flight are lost is known only when the worker answers again."""
        log.warning("worker %s lost: %s", self.address, error)
        self.lost_because = str(error)
        self._num_breaks += 1
        if self._num_breaks >= _MAX_BREAKS or error.refused:
            self._link.forget_epoch()
        self._leave()
        self._readiness.not_ready(f"the worker at {self.address} was lost: {error}")

    def renew(self) -> None:
        """Give up what the worker holds; it starts a new epoch at once or when it reconnects."""
        self._link.forget_epoch()
        self._leave()

    def empty(self) -> None:
        """Clear the plans in flight and the row table, after the sequences were requeued."""
        self.in_flight.clear()
        self.planner = RowPlanner(0)
        self.is_void = True

    def _leave(self) -> None:
        if self._attaching is not None:
            self._attaching.cancel()
            self._attaching = None
        self._link.drop()
        self.is_here = False
        self.since_ns = monotonic_ns()

    async def close(self) -> None:
        """Stop attaching and close the link."""
        if self._attaching is not None:
            self._attaching.cancel()
        await self._link.close()
