"""Why requests waited: the core's timelines, combined with the times without a ready worker, which only the service knows."""

import functools
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.reasons import WAITING_QUEUES, CoreEvent, Numbers, Reason
from scheduler_svc.observe.step_observer import StepObserver
from scheduler_svc.observe.step_record import StepOrigin
from scheduler_svc.observe.timelines import Timelines, WaitEpisode, note_heads, now_of
from scheduler_svc.readiness import Readiness
from scheduler_svc.requests.listener import RequestListener
from scheduler_svc.requests.live_request import LiveRequest, RequestStage
from scheduler_svc.requests.request_book import RequestBook
from svc_common.clock import NS_PER_S, monotonic_ns
from svc_common.errors import NotFound, QuireError
from svc_common.public_ids import meanings

_NUM_OUTAGES = 256


@dataclass(slots=True)
class _Outage:
    """A period without a worker that can run steps, in monotonic seconds; `to_time` None: it lasts."""

    why: str
    from_time: float
    to_time: float | None = None


class Explanations(StepObserver, RequestListener):
    """Timelines of the service's requests. Times are monotonic seconds, as in the core.

    `num_logged`: number of events kept, and of events about queue heads.
    """

    def __init__(self, book: RequestBook, readiness: Readiness, num_logged: int) -> None:
        self._book = book
        self._readiness = readiness
        self._timelines = Timelines(
            lambda core_id: book.in_core(core_id) is not None, num_logged=num_logged, num_heads=num_logged
        )
        self._outages: deque[_Outage] = deque(maxlen=_NUM_OUTAGES)
        self._heads: dict[str, CoreEvent] = {}
        self._last_events: dict[str, CoreEvent] = {}
        book.listen(self)
        self._note_readiness()
        readiness.listen(self._note_readiness)

    def on_plan(self, plan: StepPlan, origin: StepOrigin) -> None:
        """Keep a plan's events, and the latest event of each live request."""
        if plan.events:
            self._timelines.observe(plan.events)
        if plan.events or plan.head_numbers:
            note_heads(self._heads, plan)
        for event in plan.events:
            if event.request_id and self._book.in_core(event.request_id) is not None:
                self._last_events[event.request_id] = event

    def ended(self, live: LiveRequest, error: QuireError | None) -> None:
        """Forget the request's latest event."""
        self._last_events.pop(live.core_id, None)

    def reason_of(self, live: LiveRequest) -> tuple[str, Reason, Numbers]:
        """Current queue, reason and numbers of a live request; of several samples, the one with the latest event counts."""
        event = self._last_events.get(live.core_id) if live.place is RequestStage.IN_CORE else None
        queue = event.queue if event is not None else "waiting"
        if queue in WAITING_QUEUES and not self._readiness.serving:
            return queue, Reason.NO_WORKER, {"why": self._readiness.reason}
        if event is None:
            losses = {"losses": live.num_losses} if live.num_losses else {}
            return queue, Reason.WORKER_LOST if losses else Reason.ARRIVED, losses
        event = now_of(event, self._heads.get(queue))
        return queue, event.reason, event.numbers

    def core_ids(self, tenant: str, request_id: str) -> list[str]:
        """The core's ids for an id as printed by an API: one, or one for each prompt of the call. Raises NotFound.

        Ids of the core are accepted as they are.
        """
        for meant in meanings(request_id):
            if name := self._known(tenant, meant):
                return [name]
            parts = map(functools.partial(self._known, tenant), (f"{meant}-{i}" for i in itertools.count()))
            if names := list(itertools.takewhile(bool, parts)):
                return names
        raise NotFound(
            f"request {request_id} is not known here: it never came, or it ended too long ago (the last "
            f"{self._timelines.num_logged} events are kept); `quire replay` reads recordings",
            reason="UNKNOWN_REQUEST",
            resource_type="request",
            resource_name=request_id,
        )

    def _known(self, tenant: str, request_id: str) -> str:
        """The core's id of exactly that public id; "" if it is not known."""
        live = self._book.find(tenant, request_id)
        name = live.core_id if live is not None else f"{tenant}:{request_id}" if tenant else request_id
        return name if name in self._timelines or self._book.in_core(name) is not None else ""

    def episodes(self, core_id: str) -> list[WaitEpisode]:
        """Timeline of a request, oldest first, sample by sample; before it reaches the core, only its wait."""
        if core_id in self._timelines:
            own = self._timelines.episodes(core_id)
            return [
                part for episode in [*own, *self._outside(core_id, own[-1])] for part in self._with_outages(episode)
            ]
        live = self._book.in_core(core_id)
        if live is None:
            return []
        arrived_s = live.time.arrival_ns / NS_PER_S
        return list(self._with_outages(WaitEpisode("waiting", Reason.ARRIVED, 0, 0, None, arrived_s, None)))

    def _outside(self, core_id: str, last: WaitEpisode) -> Iterator[WaitEpisode]:
        """The wait of a request that was removed from the core as a suspect, since its removal."""
        live = self._book.in_core(core_id)
        if live is not None and live.place is RequestStage.PENDING and last.to_time is not None:
            numbers = {"losses": live.num_losses}
            yield WaitEpisode("waiting", Reason.WORKER_LOST, 0, last.to_step or 0, None, last.to_time, None, numbers)

    def _note_readiness(self) -> None:
        now = monotonic_ns() / NS_PER_S
        if self._outages and self._outages[-1].to_time is None:
            self._outages[-1].to_time = now
        if not self._readiness.serving:
            self._outages.append(_Outage(self._readiness.reason, now))

    def _with_outages(self, episode: WaitEpisode) -> Iterator[WaitEpisode]:
        """Split a wait into parts with and without a worker, since no plan could end it during an outage."""
        rest = episode
        for outage in self._outages if episode.is_wait else ():
            start = max(rest.from_time, outage.from_time)
            end = _earlier(rest.to_time, outage.to_time)
            if end is not None and end <= start:
                continue
            if start > rest.from_time:
                yield replace(rest, to_step=rest.from_step, to_time=start)
            yield replace(
                rest,
                reason=Reason.NO_WORKER,
                to_step=rest.to_step if end == rest.to_time else rest.from_step,
                from_time=start,
                to_time=end,
                numbers={"why": outage.why},
            )
            if end == rest.to_time:
                return
            assert end is not None
            rest = replace(rest, from_time=end)
        yield rest


def _earlier(one: float | None, other: float | None) -> float | None:
    """The earlier of two times; None is never."""
    return min((t for t in (one, other) if t is not None), default=None)
