"""The source distribution: setuptools' own, written again without what differs from build to build."""

import gzip
import io
import tarfile
from datetime import datetime
from pathlib import Path


def make_sdist(built: Path, folder: Path, made: datetime) -> Path:
    """Write setuptools' sdist `built` to `folder`; older ones are removed.

    Files are in order of name, owned by root, as old as the sources (`made`), with permission bits that do not depend on umask.
    """
    target = folder / built.name
    for older in folder.glob("quire-*.tar.gz"):
        older.unlink()
    plain = io.BytesIO()
    with tarfile.open(built) as source, tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as packed:
        for member in sorted(source.getmembers(), key=lambda member: member.name):
            packed.addfile(_normalised(member, made), source.extractfile(member) if member.isreg() else None)
    with target.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=int(made.timestamp())) as compressed:
        compressed.write(plain.getvalue())
    return target


def _normalised(member: tarfile.TarInfo, made: datetime) -> tarfile.TarInfo:
    mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    entry = member.replace(mtime=int(made.timestamp()), mode=mode, uid=0, gid=0, uname="", gname="", deep=False)
    entry.pax_headers = {}  # they would override: setuptools has fractions of seconds there
    return entry
