"""Log of failed steps: what ran, as in `quire steps --decode`, and where the recording is. Contains no tokens."""

import logging
from collections.abc import Callable

from scheduler_svc.observe.recording.record_buffer import RecordBuffer
from scheduler_svc.observe.step_observer import StepObserver
from scheduler_svc.observe.step_record import StepRecord
from svc_common.step_text import composition_text
from svc_common.token_bucket import TokenBucket

log = logging.getLogger(__name__)

MOST_AT_ONCE = 5
SECONDS_PER_STEP = 10.0
_LINES_OF_A_KIND = 32


class FailedSteps(StepObserver):
    """Logs failed steps. Rate limited to five failures at once and one per 10 s; the number skipped is logged.

    `admin_address()`: where operators fetch recordings. `now()`: monotonic seconds.
    """

    def __init__(self, record_buffer: RecordBuffer, admin_address: Callable[[], str], now: Callable[[], float]) -> None:
        self._record_buffer = record_buffer
        self._admin_address = admin_address
        self._allowance = TokenBucket(1 / SECONDS_PER_STEP, MOST_AT_ONCE, now)
        self._num_untold = 0

    def on_end(self, record: StepRecord) -> None:
        """Log the step if it failed."""
        if not record.failure:
            return
        if self._allowance.wait_s(1) > 0:
            self._num_untold += 1
            return
        self._allowance.take(1)
        log.error("%s", self._text(record))
        self._num_untold = 0

    def _text(self, record: StepRecord) -> str:
        lines = [f"step {record.step} failed, {record.failure}: {_why(record)}"]
        lines.append(composition_text(record.report(None), _LINES_OF_A_KIND))
        lines.append(self._recording(record.step))
        if self._num_untold:
            lines.append(f"{self._num_untold} failed steps before it are not shown; `quire steps` has them")
        return "\n".join(lines)

    def _recording(self, step: int) -> str:
        place = self._record_buffer.place_of(step) if self._record_buffer.is_on else None
        if place is None:
            return "it is not recorded; --record-memory says how much memory is for that"
        number, position = place
        return (
            f"it is recorded in segment {number}: `quire record --out step-{step}.rec --admin {self._admin_address()}` fetches it, "
            f"`quire replay step-{step}.rec --from-segment {position}` goes through it again"
        )


def _why(record: StepRecord) -> str:
    said = [part for part in (record.error, record.why) if part]
    failed = [f"{name}: {why}" for name, why in record.failed[:_LINES_OF_A_KIND]]
    return "; ".join([*said, *failed])
