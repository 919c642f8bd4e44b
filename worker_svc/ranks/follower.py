"""A rank that is not the first: it does what rank 0 tells it and answers with checksums. It has no listener."""

import asyncio
import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from paged_kernels.ranks import PeerLost
from protos.worker.v1 import worker_pb2
from svc_common.errors import QuireError, Unavailable
from svc_common.signals import stop_on_signals
from worker_svc.engine import DeviceLost, Pending
from worker_svc.ranks.channel import Channel, MessageKind, RankWatch, error_message
from worker_svc.ranks.joining import join
from worker_svc.ranks.member import GroupRanks
from worker_svc.ranks.step_answers import (
    RankEngine,
    RefusedStep,
    error_answer,
    finishes_at_launch,
    forget_adapter,
    launched,
    step_answer,
)
from worker_svc.settings import WorkerSettings

log = logging.getLogger(__name__)

_GOODBYE_S = 8.0
"""How long a rank that is to stop waits for rank 0 to stop first, so that no stream ends."""

_READ_S = 0.5


def follow(channel: Channel, ranks: GroupRanks, make: Callable[[], RankEngine]) -> None:
    """Do what rank 0 tells this rank until it says goodbye. Raises PeerLost, and what makes this rank unable to go on."""
    engine: RankEngine | None = None
    steps = _Steps(channel, ranks)
    while True:
        kind, content = channel.receive()
        if kind is MessageKind.GOODBYE:
            return
        if kind is MessageKind.STEP:
            assert engine is not None
            steps.launch(engine, content)
        elif kind is MessageKind.FINISH:
            assert engine is not None
            steps.finish(engine)
        elif kind is MessageKind.CALL:
            asked = json.loads(content)
            if asked["call"] == "load":
                engine = _loaded(channel, make)
            else:
                assert engine is not None
                if asked["call"] == "reset":
                    steps.drop()
                _answer(channel, engine, asked["call"], asked["arguments"])
        else:
            raise PeerLost(f"{channel.peer} sent {kind.name} where a call was expected", differs=True)


class _Steps:
    """Steps in flight on this rank. Each is finished when rank 0 finishes it, unless `finishes_at_launch`."""

    def __init__(self, channel: Channel, ranks: GroupRanks) -> None:
        self._channel, self._ranks = channel, ranks
        self._tells_result = ranks.num_stages > 1 and ranks.is_last_stage and ranks.tensor_rank == 0
        self._pending: deque[tuple[worker_pb2.SchedulerOutputs, Pending]] = deque()

    def launch(self, engine: RankEngine, content: bytes) -> None:
        """Launch the step in a message."""
        outputs = worker_pb2.SchedulerOutputs.FromString(content)
        self._pending.append((outputs, launched(engine, self._ranks, outputs)))
        if finishes_at_launch(engine, self._ranks):
            self.finish(engine)

    def finish(self, engine: RankEngine) -> None:
        """Finish the oldest step and answer it. An error within the step is raised: other ranks wait for this one's part."""
        outputs, pending = self._pending.popleft()
        if isinstance(pending, RefusedStep):
            if not isinstance(pending.error, QuireError):
                log.error("a step failed", exc_info=pending.error)
            self._channel.send(MessageKind.ANSWER, error_answer(pending.error))
            return
        result = pending.finish()
        told = result.SerializeToString() if self._tells_result else b""
        self._channel.send(MessageKind.ANSWER, step_answer(engine, outputs, result) + told)

    def drop(self) -> None:
        """Forget all steps: their owner is gone."""
        self._pending.clear()


def _loaded(channel: Channel, make: Callable[[], RankEngine]) -> RankEngine:
    try:
        engine = make()
        engine.load(lambda _stage, _fraction: None)
    except PeerLost:
        raise
    except Exception as error:
        channel.send(MessageKind.FAILED, error_message(error))
        raise
    channel.send(MessageKind.ANSWER)
    return engine


def _answer(channel: Channel, engine: RankEngine, call: str, arguments: dict[str, Any]) -> None:
    try:
        result = forget_adapter(engine, **arguments) if call == "forget_adapter" else getattr(engine, call)(**arguments)
    except (PeerLost, DeviceLost):
        raise
    except Exception as error:
        if not isinstance(error, QuireError):
            log.exception("the call %s failed", call)
        channel.send(MessageKind.FAILED, error_message(error))
        return
    is_profile = isinstance(result, worker_pb2.ProfileCacheResponse)
    channel.send(MessageKind.ANSWER, result.SerializeToString() if is_profile else b"")


# --- the process -------------------------------------------------------------------------------------------------------


async def serve_follower(
    settings: WorkerSettings,
    make: Callable[[GroupRanks], RankEngine],
    *,
    on_ready: Callable[[str], None],
    stop: asyncio.Event | None = None,
) -> None:
    """Run a rank until rank 0 says goodbye, or some seconds after SIGTERM, SIGINT or `stop`.

    `on_ready` gets the address of rank 0. Raises Unavailable if the group ends otherwise, ConfigError if this rank cannot be
    in it.
    """
    loop, stop = asyncio.get_running_loop(), stop or asyncio.Event()
    ended: asyncio.Future[None] = loop.create_future()
    is_stopped = threading.Event()

    def end(error: BaseException | None) -> None:
        if not ended.done():
            ended.set_result(None) if error is None else ended.set_exception(error)

    def work() -> None:
        error = None
        try:
            _run(settings, make, is_stopped, lambda why: loop.call_soon_threadsafe(end, why))
        except BaseException as raised:
            error = raised
        loop.call_soon_threadsafe(end, error)

    thread = threading.Thread(target=work, name="engine", daemon=True)
    with stop_on_signals(stop):
        thread.start()
        on_ready(settings.leader)
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({stopped, ended}, return_when=asyncio.FIRST_COMPLETED)
            is_stopped.set()
            if not ended.done():
                await asyncio.wait({ended}, timeout=_GOODBYE_S)
            if ended.done() and not stop.is_set():
                _raise(ended)
        finally:
            stopped.cancel()
            if ended.done():
                ended.exception()
            thread.join(0.1)


def _raise(ended: "asyncio.Future[None]") -> None:
    try:
        ended.result()
    except PeerLost as lost:
        raise Unavailable(f"the group of this rank has ended: {lost.message}", reason="RANK_LOST") from lost


def _run(
    settings: WorkerSettings,
    make: Callable[[GroupRanks], RankEngine],
    is_stopped: threading.Event,
    on_lost: Callable[[PeerLost], None],
) -> None:
    joined = join(settings, is_stopped)
    if joined is None:
        return
    ranks, channel = joined

    is_over = threading.Event()

    def lose(why: PeerLost) -> None:
        ranks.lose(why)
        if not is_over.wait(_READ_S):  # the last message, a goodbye perhaps, may be unread
            on_lost(why)

    watch = RankWatch([channel], lose)
    try:
        follow(channel, ranks, lambda: make(ranks))
    finally:
        is_over.set()
        watch.close()
        ranks.lose(PeerLost("this rank has ended"))
        channel.close()
