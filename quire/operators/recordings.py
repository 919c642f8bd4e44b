"""Download a recording from a running scheduler into a file. Used by `quire record`."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.operators.admin import AdminClient
from scheduler_svc.observe.recording.file_format import RecordingWriter
from svc_common.errors import ConfigError, FailedPrecondition

OnSegment = Callable[["Fetch"], None]


class Fetch:
    """Writes one recording file. Segments are written whole or not at all.

    `num_left`: segments that the scheduler reported as not yet sent.
    """

    def __init__(self, client: AdminClient, writer: RecordingWriter, on_segment: OnSegment) -> None:
        self.num_segments = 0
        self.num_steps = 0
        self.num_left = 0
        self._client = client
        self._writer = writer
        self._on_segment = on_segment
        self._has_begun = False
        self._next = 0

    @property
    def num_bytes(self) -> int:
        """Bytes written so far."""
        return self._writer.num_bytes

    def held(self) -> None:
        """Fetch all held segments that were not fetched yet, the incomplete one included."""
        self._take(follow=False)

    def coming(self, for_s: float | None) -> None:
        """Fetch segments as they complete, forever or for `for_s` seconds."""
        self._take(follow=True, for_s=for_s)

    def finish(self) -> None:
        """Finish the file. Raises FailedPrecondition if there was nothing to record."""
        if not self.num_segments:
            raise FailedPrecondition(
                "the scheduler has planned no step yet: there is nothing to record", reason="EMPTY"
            )
        self._writer.finish(num_segments=self.num_segments, num_steps=self.num_steps)

    def _take(self, *, follow: bool, for_s: float | None = None) -> None:
        pending = bytearray()
        for part in self._client.recording(since=self._next, follow=follow, for_s=for_s):
            if part.beginning and not self._has_begun:
                self._writer.write(part.beginning)
                self._has_begun = True
            pending += part.data
            if part.HasField("num_steps"):
                self._writer.write(bytes(pending))
                pending.clear()
                self._next = part.segment + 1
                self.num_segments += 1
                self.num_steps += part.num_steps
                self.num_left = part.num_left
                self._on_segment(self)


@contextmanager
def written(path: Path) -> Iterator[RecordingWriter]:
    """A writer of `path`, which is created only on success; ConfigError if it cannot be written."""
    unfinished = path.with_name(f"{path.name}.part")
    try:
        with unfinished.open("wb") as file:
            yield RecordingWriter(file)
        os.replace(unfinished, path)
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written: {error.strerror}", reason="OUT_FILE") from None
    finally:
        unfinished.unlink(missing_ok=True)
