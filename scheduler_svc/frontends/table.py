"""All gateways of this scheduler, with or without a stream at the moment; what is held for those without, and for how long."""

import logging
from collections.abc import Callable

from scheduler_svc.frontends.cursors import Attachment, Frontend
from scheduler_svc.readiness import Readiness
from scheduler_svc.requests.book import RequestBook

log = logging.getLogger(__name__)


class FrontendTable:
    """Owner of all frontends. `call_later(seconds, callback)` runs the grace time."""

    def __init__(
        self,
        book: RequestBook,
        readiness: Readiness,
        grace_s: float,
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._book = book
        self._readiness = readiness
        self._grace_s = grace_s
        self._call_later = call_later
        self._frontends: dict[str, Frontend] = {}
        readiness.listen(self._tell_all)

    def __len__(self) -> int:
        return len(self._frontends)

    def attach(self, frontend_id: str) -> tuple[Frontend, Attachment]:
        """The frontend of that id, known or new, and its new stream."""
        frontend = self._frontends.get(frontend_id)
        if frontend is None:
            frontend = self._frontends[frontend_id] = Frontend(frontend_id, self._book, self._readiness)
        attachment = frontend.attach()
        if frontend.held:
            self._start_grace(frontend, attachment)
        return frontend, attachment

    def detach(self, frontend: Frontend, attachment: Attachment) -> None:
        """That stream has ended, whoever ended it."""
        if frontend.attachment is not attachment:
            return
        frontend.detach()
        if frontend.held:
            log.info("frontend %s lost; %d resumable requests are held", frontend.frontend_id, len(frontend.held))
            self._start_grace(frontend, None)
        else:
            self._frontends.pop(frontend.frontend_id, None)

    def close_all(self) -> None:
        """Ends all streams; the service stops."""
        for frontend in list(self._frontends.values()):
            if frontend.attachment is not None:
                frontend.attachment.close()

    def _start_grace(self, frontend: Frontend, attachment: Attachment | None) -> None:
        """Cancels what is held then, unless another stream came or went meanwhile."""

        def over() -> None:
            if frontend.attachment is attachment:
                frontend.cancel_held()
                if attachment is None:
                    self._frontends.pop(frontend.frontend_id, None)

        self._call_later(self._grace_s, over)

    def _tell_all(self) -> None:
        for frontend in self._frontends.values():
            frontend.state_changed()
