"""Files that a worker keeps between starts: each complete or not there, the newest of them, and digests of large ones.

Not what they contain: fused/packed_files.py.
"""

import contextlib
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

_SETTLED_NS = 2 * 10**9
_DIGEST = re.compile("[0-9a-f]{64}")


@contextlib.contextmanager
def complete_file(path: Path) -> Iterator[IO[bytes]]:
    """Write a file, readable by its owner alone, that appears at `path` only once the block ends without an error."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.stem}.", suffix=".partial", delete=False) as file:
        try:
            yield file
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def keep_newest(folder: Path, *, most_bytes: int, most_files: int) -> None:
    """Delete the files that were modified longest ago, until no more than these are left. A deleted file stays mapped."""
    files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    total = 0
    for count, file in enumerate(files, 1):
        total += file.stat().st_size
        if total > most_bytes or count > most_files:
            file.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells one content of a file from another without reading it.

    The system sets the time of change with every write, and programs cannot set it. Its clock is coarse: a stamp
    names one content only if it `is_settled`.
    """

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """The stamp of a file now."""
        found = path.stat()
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def is_settled(self) -> bool:
        """True if the file was last changed so long ago that a later change gets another stamp."""
        return self.changed_ns < time.time_ns() - _SETTLED_NS


def content_digest(folder: Path, path: Path, stamp: FileStamp) -> str:
    """SHA-256 (hex) of a file with this stamp. Kept in `folder`, so that it is read only once.

    Raises OSError if it cannot be read.
    """
    note = folder / f"{hashlib.sha256(repr(stamp).encode()).hexdigest()[:32]}.digest"
    with contextlib.suppress(OSError, ValueError):
        kept = note.read_text(encoding="ascii")
        if _DIGEST.fullmatch(kept):
            os.utime(note)
            return kept
    is_settled = stamp.is_settled
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if is_settled and FileStamp.of(path) == stamp:
        with contextlib.suppress(OSError), complete_file(note) as file:
            file.write(digest.encode())
    return digest
