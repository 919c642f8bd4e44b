"""Checksums and release notes of the files in a folder."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

SUMS, NOTES = "SHA256SUMS", "NOTES.txt"
_UNRELEASED = "Unreleased"


def checksums(files: Sequence[Path]) -> str:
    """One line for each file, by name, as `sha256sum --check` reads them."""
    return "".join(f"{sha256(file)}  {file.name}\n" for file in sorted(files))


def sha256(file: Path) -> str:
    """Its digest, in hexadecimal."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def changelog_section(changelog: str, version: str) -> str:
    """What CHANGELOG.md says about `version`, or else about what is not released yet; empty where it has neither."""
    sections = re.split(r"^## \[([^\]]+)\].*$", changelog, flags=re.M)
    found = dict(zip(sections[1::2], sections[2::2], strict=True))
    return found.get(version, found.get(_UNRELEASED, "")).strip()


def release_notes(version: str, commit: str, section: str, files: Sequence[Path]) -> str:
    """The text that goes beside the files, in Markdown."""
    rows = (f"| `{file.name}` | {megabytes(file)} | `{sha256(file)}` |\n" for file in sorted(files))
    table = "".join(("| file | MB | SHA-256 |\n|---|---|---|\n", *rows))
    head = f"# Quire {version}\n\nMade from commit `{commit}`. Each wheel has its SBOM in `*.dist-info/sboms/`.\n"
    return f"{head}\n{table}\n{section}\n"


def megabytes(file: Path) -> str:
    """Size, rounded, in millions of bytes."""
    return f"{file.stat().st_size / 1e6:.1f}"
