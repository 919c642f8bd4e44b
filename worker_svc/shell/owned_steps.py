"""Steps from the owner's stream through the engine and back: one owner at most, results in order, none of an old epoch.

`ownership.py` decides, the engine thread computes, the current stream gets the results. Makes no gRPC calls.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from protos.worker.v1 import worker_pb2
from svc_common import clock
from svc_common.errors import Aborted, FailedPrecondition, InvalidArgument, QuireError, Unavailable
from svc_common.net import rpc
from worker_svc.engine import DeviceLost, Finished, Pending
from worker_svc.shell.engine_thread import EngineThread
from worker_svc.shell.grants import DecodeGrants
from worker_svc.shell.lifecycle import FAILED, Lifecycle
from worker_svc.shell.metrics import StepMeter
from worker_svc.shell.ownership import Hello, Ownership, StepVerdict
from worker_svc.shell.step_spans import StepClock, StepSpans
from worker_svc.shell.step_stream import StepStream

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Done:
    """A step that ran, with its result; an error is part of the result."""

    outputs: worker_pb2.SchedulerOutputs
    result: worker_pb2.WorkerOutputs
    times: StepClock


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step launched on the engine; an `engine_thread.Later`."""

    ownership: Ownership[worker_pb2.WorkerOutputs]
    outputs: worker_pb2.SchedulerOutputs
    pending: Pending
    queued_ns: int
    start_ns: int
    on_result: Callable[[worker_pb2.SchedulerOutputs, worker_pb2.WorkerOutputs], None]

    def wait(self) -> None:
        """See Later."""
        self.pending.wait()

    def finish(self) -> _Done | None:
        """Runs on the engine thread: the result, or None if its epoch is over."""
        if self.outputs.epoch != self.ownership.epoch:
            return None
        try:
            result = self.pending.finish()
        except DeviceLost:
            raise
        except Exception as error:
            result = _failed(error)
        result.step_id, result.epoch = self.outputs.step_id, self.outputs.epoch
        result.timings.queued_ns, result.timings.started_ns = self.queued_ns, self.start_ns
        self.on_result(self.outputs, result)
        return _Done(self.outputs, result, StepClock(self.start_ns, clock.wall_ns()))


def _failed(error: Exception) -> worker_pb2.WorkerOutputs:
    """The result of a step that failed with `error`."""
    known = error if isinstance(error, QuireError) else rpc.hide(error)
    return worker_pb2.WorkerOutputs(error=rpc.to_error_status(known))


class OwnedSteps:
    """Owner of the current stream and of the steps in flight. Lives on the event loop."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        thread: EngineThread,
        ownership: Ownership[worker_pb2.WorkerOutputs],
        identity: rpc.Identity,
        spans: StepSpans,
        meter: StepMeter,
        *,
        max_open: int,
    ) -> None:
        self._lifecycle, self._thread = lifecycle, thread
        self._ownership, self._identity, self._spans = ownership, identity, spans
        self._meter = meter
        self._grants = DecodeGrants()
        self._max_open = max_open
        self._stream: StepStream | None = None
        self._stopping: QuireError | None = None

    @property
    def epoch(self) -> int:
        """Current epoch; 0 = never owned."""
        return self._ownership.epoch

    # --- streams -----------------------------------------------------------------------------------------------------

    def open(self, message: worker_pb2.SchedulerOutputs) -> StepStream:
        """Grant the worker to the scheduler that sent a hello.

        The returned stream holds the welcome and, if the epoch is resumed, the unread results.
        """
        if self._stopping is not None:
            raise self._stopping
        self._lifecycle.require_ready()
        if not message.HasField("hello"):
            raise InvalidArgument.field("hello", "the first message of Run must contain only hello")
        hello = message.hello
        self._identity.agree(hello.identity, "the scheduler")
        if not hello.identity.boot_id:
            raise InvalidArgument.field("hello.identity.boot_id", "is empty; it must identify the owner")
        grant = self._ownership.hello(_hello(hello), _now_s())
        if not grant.resumed:
            self._begin_epoch()
        stream = StepStream(grant.stream, max_open=self._max_open)
        self._replace_stream(stream, hello.identity.boot_id)
        stream.send(self._welcome(resumed=grant.resumed))
        for result in grant.results:
            stream.send(result)
        stream.expect(self._ownership.num_open)
        return stream

    def _replace_stream(self, stream: StepStream, owner: str) -> None:
        self._grants.revoke()
        if self._stream is not None:
            over = Aborted(
                f"scheduler {owner} owns this worker in epoch {self.epoch}; this stream is over",
                reason="STREAM_REPLACED",
                metadata={"owner": owner, "epoch": str(self.epoch)},
            )
            # Unsent results are sent on the new stream if the epoch is resumed, and are void otherwise.
            self._stream.fail(over, drop_unsent=True)
        self._stream = stream

    def _begin_epoch(self) -> None:
        self._spans.end_all("epoch over")
        self._meter.begin_epoch()
        self._grants = DecodeGrants()
        reset = self._thread.submit(self._lifecycle.engine.reset)
        reset.add_done_callback(lambda done: self.lose_engine(done.exception()) if done.exception() else None)

    def _welcome(self, *, resumed: bool) -> worker_pb2.WorkerOutputs:
        limits = self._lifecycle.limits
        assert limits is not None
        welcome = worker_pb2.RunWelcome(
            identity=self._identity.message(), epoch=self.epoch, resumed=resumed, model_digest=limits.model_digest
        )
        return worker_pb2.WorkerOutputs(welcome=welcome)

    def close(self, stream: StepStream) -> None:
        """End a call: the lease starts, or ends at once after a goodbye. Idempotent."""
        stream.finish()
        self._ownership.leave(stream.number, _now_s(), goodbye=stream.said_goodbye)
        if self._stream is stream:
            self._stream = None
            self._grants.revoke()

    # --- steps -------------------------------------------------------------------------------------------------------

    def receive(self, stream: StepStream, message: worker_pb2.SchedulerOutputs) -> None:
        """Handle one message of `stream`: queue a step, answer again one that already ran, or take a goodbye.

        Raises the error that ends the stream.
        """
        if message.HasField("hello"):
            raise InvalidArgument.field("hello", "is allowed only in the first message")
        if message.HasField("goodbye"):
            self._grants.revoke()
            stream.say_goodbye()
            return
        if message.HasField("revocation"):
            self._grants.revoke()
            return
        verdict = self._ownership.accept(stream.number, message.epoch, message.step_id)
        if verdict is StepVerdict.RUN:
            self._check_order(message.step_id)
            self._grants.receive(message)
            stream.expect()
            launch = partial(self._launch, message, clock.monotonic_ns())
            future: asyncio.Future[_Done | None] = self._thread.submit(launch)
            future.add_done_callback(self._finished)
        elif verdict is StepVerdict.ANSWERED:
            stream.send(self._ownership.result(message.step_id))

    def _check_order(self, step_id: int) -> None:
        """Refuse a plan for a step that was begun by a grant."""
        if step_id <= self._grants.last_begun:
            raise FailedPrecondition(
                f"step {step_id} was begun by a grant; send its plan after a result without `continues`",
                reason="STEP_GAP",
            )

    def _launch(self, message: worker_pb2.SchedulerOutputs, received_ns: int) -> _Done | _Launched | None:
        """Runs on the engine thread. None for a step of an older epoch, which is not run."""
        if message.epoch != self._ownership.epoch:
            return None
        queued_ns, start_ns = clock.monotonic_ns() - received_ns, clock.wall_ns()
        try:
            pending = self._lifecycle.engine.launch(message)
        except DeviceLost:
            raise
        except Exception as error:
            pending = Finished(_failed(error))
        launched = _Launched(self._ownership, message, pending, queued_ns, start_ns, self._go_on)
        return launched.finish() if pending.is_ready else launched

    def _go_on(self, outputs: worker_pb2.SchedulerOutputs, result: worker_pb2.WorkerOutputs) -> None:
        """Runs on the engine thread: begin the next granted step, if there is one."""
        if outputs.epoch != self._ownership.epoch:
            return
        following = self._grants.next_step(outputs, result)
        if following is not None:
            result.continues = True
            self._thread.follow(partial(self._launch, following, clock.monotonic_ns()), self._finished)

    def _finished(self, future: "asyncio.Future[_Done | None]") -> None:
        if future.exception() is not None:
            self.lose_engine(future.exception())
            return
        done = future.result()
        if done is None or not self._ownership.record(done.result.epoch, done.result.step_id, done.result):
            return
        if done.result.continues:
            self._ownership.accept_granted()
        if self._stream is not None:
            self._stream.expect(int(done.result.continues))
            self._stream.answer(done.result)
        # After the stream's task has sent the result: the scheduler waits for it.
        asyncio.get_running_loop().call_soon(self._account, done)

    def _account(self, done: _Done) -> None:
        self._meter.step(done.outputs, done.result)
        if done.result.HasField("error"):
            log.warning("step %d failed: %s", done.result.step_id, done.result.error.message)
        try:
            self._spans.step(done.outputs, done.result, done.times)
        except Exception:
            # A telemetry error must not fail a step.
            log.exception("no spans for step %d", done.result.step_id)

    def lose_engine(self, error: BaseException | None) -> None:
        """End the worker once: answered results are sent, then the stream ends with the reason, then the process."""
        if self._lifecycle.state == FAILED:
            return
        log.error("the engine is lost: %s; this worker exits, restart it", error, exc_info=error)
        why = Unavailable(f"the engine is lost: {error}; this worker exits, restart it", reason="DEVICE_LOST")
        self._stop(why, drop_unsent=False)
        self._lifecycle.fail(why)

    def _stop(self, error: QuireError, *, drop_unsent: bool) -> None:
        self._stopping = self._stopping or error
        if self._stream is not None:
            self._stream.fail(error, drop_unsent=drop_unsent)

    async def drain(self) -> None:
        """Accept no more steps, finish those in flight and end the stream with UNAVAILABLE (WORKER_STOPPING)."""
        stopping = Unavailable("this worker is stopping", reason="WORKER_STOPPING")
        self._stopping = self._stopping or stopping
        self._grants.revoke()
        if self._stream is not None:
            self._stream.finish(stopping)
        await self._thread.submit(lambda: None)
        self._stop(stopping, drop_unsent=False)
        self._spans.end_all("worker stopped")


def _hello(message: worker_pb2.RunHello) -> Hello:
    return Hello(
        scheduler_boot_id=message.identity.boot_id,
        epoch=message.epoch,
        worker_boot_id=message.worker_boot_id,
        last_step_id=message.last_step_id,
        force=message.force,
    )


def _now_s() -> float:
    return clock.monotonic_ns() / clock.NS_PER_S
