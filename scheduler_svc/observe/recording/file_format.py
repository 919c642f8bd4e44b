"""Recording files: a preamble, a header, one frame per segment, and an end with totals.

    preamble   "QUIREREC" | format number u32 | length u32 | version of quire, UTF-8
    frame      kind u8 | compressed length u64 | plain length u64 | BLAKE2b-128 of kind, lengths and contents | zlib contents

The end frame has the digest of all bytes before it, so that omissions, insertions and moves are detected.
This protects against accidents, not forgery: the digests have no key.
"""

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from scheduler_svc.observe.recording.codec import BadSegment, TokenRename, decode, encode
from scheduler_svc.observe.recording.segment_buffer import RecordingSegment
from svc_common.errors import ConfigError
from svc_common.version import VERSION

MAGIC = b"QUIREREC"
FORMAT = 11
HEADER, SEGMENT, END = 1, 2, 3
_PREAMBLE = struct.Struct("<8sII")
_FRAME = struct.Struct("<BQQ16s")
_DIGEST_BYTES = 16
_MAX_PLAIN_BYTES = 2**32
_MAX_VERSION_BYTES = 100
_CHUNK = 2**20
_LEVEL = 3


class RecordingError(ConfigError):
    """The file is not a recording that can be read; the message says what is wrong, where, and what to do."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Position of a frame's contents in the file."""

    kind: int
    start: int
    num_bytes: int
    num_plain_bytes: int


# --- writing ----------------------------------------------------------------------------------------------------------


def beginning(about: dict[str, Any]) -> bytes:
    """The first bytes of a file. `about`: for people and programs, for example whether tokens are verbatim."""
    version = VERSION.encode()
    return _PREAMBLE.pack(MAGIC, FORMAT, len(version)) + version + _frame(HEADER, json.dumps(about).encode())


def segment_frame(segment: RecordingSegment, rename: TokenRename | None) -> bytes:
    """Frame of one segment; `rename` None: keep its tokens."""
    return _frame(SEGMENT, encode(segment, rename))


def contents(frame: bytes) -> bytes:
    """The plain contents of a frame made in this process."""
    return zlib.decompress(frame[_FRAME.size :])


def _frame(kind: int, plain: bytes) -> bytes:
    packed = zlib.compress(plain, _LEVEL)
    return _FRAME.pack(kind, len(packed), len(plain), _digest(kind, len(packed), len(plain), packed)) + packed


def _digest(kind: int, num_bytes: int, num_plain: int, packed: bytes) -> bytes:
    hasher = hashlib.blake2b(struct.pack("<BQQ", kind, num_bytes, num_plain), digest_size=_DIGEST_BYTES)
    hasher.update(packed)
    return hasher.digest()


class RecordingWriter:
    """Writes the output of `beginning` and `segment_frame`, in any chunks, and the end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._hasher.update(data)
        self.num_bytes += len(data)
        self._file.write(data)

    def finish(self, *, num_segments: int, num_steps: int) -> None:
        """Write the end frame; nothing may follow."""
        totals = {"num_segments": num_segments, "num_steps": num_steps, "digest": self._hasher.hexdigest()}
        self.write(_frame(END, json.dumps(totals).encode()))


# --- reading ----------------------------------------------------------------------------------------------------------


class Recording:
    """A recording file: fully checked when opened, read segment by segment.

    `about`: its header; `num_steps`: total of all segments. Raises RecordingError for files that are not
    recordings, of another version, truncated, or altered.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._frames: list[Frame] = []
        self.about: dict[str, Any] = {}
        self.num_steps = 0
        try:
            with path.open("rb") as file:
                self._check(file)
        except OSError as error:
            raise self._error("UNREADABLE", f"cannot be read: {error.strerror}") from None

    @property
    def num_segments(self) -> int:
        """Number of segments."""
        return len(self._frames)

    def segments(self, start: int = 0) -> Iterator[RecordingSegment]:
        """Segments from number `start` on, counted from 0. Raises ConfigError if there is no such segment."""
        if not 0 <= start < max(1, len(self._frames)):
            last = len(self._frames) - 1
            raise self._error("NO_SUCH_SEGMENT", f"has no segment {start}; the first is 0, the last {last}")
        for number in range(start, len(self._frames)):
            yield self.segment(number)

    def segment(self, number: int) -> RecordingSegment:
        """One segment."""
        with self.path.open("rb") as file:
            plain = self._plain(file, self._frames[number])
        try:
            return decode(plain)
        except BadSegment as error:
            raise self._error("ALTERED", f"segment {number} makes no sense ({error}); record again") from None

    # --- inside ------------------------------------------------------------------------------------------------------

    def _check(self, file: BinaryIO) -> None:
        size = os.fstat(file.fileno()).st_size
        hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        hasher.update(self._check_preamble(file))
        frames: list[Frame] = []
        while not frames or frames[-1].kind != END:
            before = hasher.hexdigest()
            frames.append(self._check_frame(file, size, hasher, len(frames)))
        if file.read(1):
            raise self._altered(file.tell() - 1, "something follows the end")
        kinds = [frame.kind for frame in frames]
        if kinds != [HEADER, *[SEGMENT] * (len(frames) - 2), END]:
            raise self._altered(frames[0].start, "its parts are not in their order")
        self.about = self._values(file, frames[0])
        totals = self._values(file, frames[-1])
        self._frames = frames[1:-1]
        self.num_steps = int(totals.get("num_steps", 0))
        if (totals.get("digest"), totals.get("num_segments")) != (before, len(self._frames)):
            raise self._altered(frames[-1].start, "its parts are not those that were recorded together")

    def _check_preamble(self, file: BinaryIO) -> bytes:
        head = file.read(_PREAMBLE.size)
        if not head.startswith(MAGIC):
            if head and MAGIC.startswith(head):
                raise self._cut_short(len(head))
            raise self._error("NOT_A_RECORDING", "is no recording of quire; make one with `quire record --out FILE`")
        if len(head) < _PREAMBLE.size:
            raise self._cut_short(len(head))
        _, number, length = _PREAMBLE.unpack(head)
        version = file.read(min(length, _MAX_VERSION_BYTES))
        name = version.decode("utf-8", "replace")
        if number != FORMAT or (len(version) == length and name != VERSION):
            raise self._error(
                "OTHER_VERSION",
                f"was recorded by quire {name} (format {number}); this is quire {VERSION} (format {FORMAT}): "
                f"replay it with the build that recorded it, or record again with this one",
            )
        if len(version) < length:
            raise self._cut_short(len(head) + len(version))
        return head + version

    def _check_frame(self, file: BinaryIO, size: int, hasher: "hashlib.blake2b", number: int) -> Frame:
        start = file.tell()
        head = file.read(_FRAME.size)
        if len(head) < _FRAME.size:
            raise self._cut_short(start + len(head))
        kind, num_bytes, num_plain, digest = _FRAME.unpack(head)
        if kind not in (HEADER, SEGMENT, END) or num_plain > _MAX_PLAIN_BYTES:
            raise self._altered(start, f"frame {number} begins with what no frame begins with")
        if start + _FRAME.size + num_bytes > size:
            raise self._cut_short(size)
        hasher.update(head)
        own = hashlib.blake2b(struct.pack("<BQQ", kind, num_bytes, num_plain), digest_size=_DIGEST_BYTES)
        left = num_bytes
        while left:
            data = file.read(min(left, _CHUNK))
            if not data:
                raise self._cut_short(file.tell())
            own.update(data)
            hasher.update(data)
            left -= len(data)
        if own.digest() != digest:
            raise self._altered(start, f"frame {number} is not what was written")
        return Frame(kind, start + _FRAME.size, num_bytes, num_plain)

    def _plain(self, file: BinaryIO, frame: Frame) -> bytes:
        file.seek(frame.start)
        unpacker = zlib.decompressobj()
        try:
            plain = unpacker.decompress(file.read(frame.num_bytes), frame.num_plain_bytes + 1)
        except zlib.error as error:
            raise self._altered(frame.start, str(error)) from None
        if len(plain) != frame.num_plain_bytes:
            raise self._altered(frame.start, "a frame is not as long as it says")
        return plain

    def _values(self, file: BinaryIO, frame: Frame) -> dict[str, Any]:
        try:
            values = json.loads(self._plain(file, frame))
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise self._altered(frame.start, "a frame holds no values")
        return values

    def _cut_short(self, at: int) -> RecordingError:
        return self._error("CUT_SHORT", f"ends at byte {at}, before its end; copy it again, or record again")

    def _altered(self, at: int, what: str) -> RecordingError:
        return self._error("ALTERED", f"was altered near byte {at}: {what}; copy it again, or record again")

    def _error(self, reason: str, what: str) -> RecordingError:
        return RecordingError(f"{self.path} {what}", reason=reason, metadata={"file": str(self.path)})
