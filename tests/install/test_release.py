"""Packages of a release: SBOMs that hold to the standard, the same bytes from equal sources, notes and checksums."""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from deploy import source
from deploy.release import notes
from deploy.sbom import bill_of_materials
from deploy.sdist import make_sdist
from tests.support.tree import ROOT

MADE = datetime(2026, 11, 29, 1, 6, 32, tzinfo=UTC)
METADATA = """Metadata-Version: 2.4
Name: quire
Version: 0.1.0
Summary: LLM serving
License-Expression: Apache-2.0
Requires-Dist: numpy>=2.0
Requires-Dist: tokenizers<0.24,>=0.22.1; extra == "gateway"
Requires-Dist: tokenizers<0.24,>=0.22.1; extra == "worker"
Requires-Dist: triton>=3.6; platform_system == "Linux" and extra == "cuda"
Requires-Dist: quire[worker]; extra == "all"
Requires-Dist: pytest>=9; extra == "dev"
Provides-Extra: all
Provides-Extra: cuda
Provides-Extra: dev
Provides-Extra: gateway
Provides-Extra: worker

Text that contains no requirement.
"""
LIBRARY = "paged_kernels/cpu_prebuilt/aarch64-neon.so"
MODEL = {
    f"quire/tiny/{name}": (ROOT / "quire" / "tiny" / name).read_bytes() for name in ("README.md", "model.safetensors")
}
PURE = {"quire-0.1.0.dist-info/METADATA": METADATA.encode(), **MODEL}


def sbom(files: dict[str, bytes], made: datetime = MADE) -> dict:
    """Of a wheel with these files, after validation."""
    text = bill_of_materials("quire-0.1.0-py3-none-any.whl", files, made).decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    assert bill_of_materials("quire-0.1.0-py3-none-any.whl", dict(reversed(files.items())), made).decode() == text
    return json.loads(text)


def test_sbom_lists_what_is_carried_and_what_is_required() -> None:
    """The model with its license, each distribution once with its ranges; nothing that only development needs."""
    found = sbom(PURE)
    named = {component["name"]: component for component in found["components"]}
    assert set(named) == {"tiny", "numpy", "tokenizers", "triton"}
    assert named["tiny"]["licenses"] == [{"license": {"id": "PSF-2.0"}}]
    assert named["tiny"]["hashes"][0]["content"] == hashlib.sha256(MODEL["quire/tiny/model.safetensors"]).hexdigest()
    assert {name: named[name].get("scope") for name in named} == {
        "tiny": None,
        "numpy": "required",
        "tokenizers": "optional",
        "triton": "optional",
    }
    assert [part["value"] for part in named["tokenizers"]["properties"]] == [
        'tokenizers<0.24,>=0.22.1; extra == "gateway"',
        'tokenizers<0.24,>=0.22.1; extra == "worker"',
    ]
    assert found["metadata"]["timestamp"] == MADE.isoformat()
    assert found["metadata"]["component"]["purl"].startswith("pkg:generic/quire@0.1.0?")


def test_sbom_lists_compiled_kernels_with_their_runtime() -> None:
    """A library by its digest, what the compiler's C++ library added, and the compiler among the tools."""
    pytest.importorskip("ziglang", reason="ziglang is not installed: make wheel")
    content = b"\x7fELF\0clang version 22.1.8\0"
    found = sbom({**PURE, LIBRARY: content})
    named = {component["name"]: component for component in found["components"]}
    assert named[LIBRARY]["hashes"][0]["content"] == hashlib.sha256(content).hexdigest()
    assert named["libc++"]["version"] == "22.1.8"
    assert "ziglang" in {tool["name"] for tool in found["metadata"]["tools"]["components"]}


def test_sbom_is_another_for_other_contents() -> None:
    """Serial numbers name contents."""
    numbers = {
        sbom(PURE)["serialNumber"],
        sbom({**PURE, "quire/more.py": b""})["serialNumber"],
        sbom(PURE, MADE.replace(year=2025))["serialNumber"],
    }
    assert len(numbers) == 3


def sdist(folder: Path, *, names: list[str], mtime: int, umask: int) -> Path:
    """As setuptools leaves it: with the builder's times, to fractions of a second, owner and umask."""
    folder.mkdir()
    path = folder / "quire-0.1.0.tar.gz"
    with tarfile.open(path, "w:gz") as packed:
        for name in names:
            entry = tarfile.TarInfo(f"quire-0.1.0/{name}")
            entry.size, entry.mtime, entry.uid, entry.uname = len(name), mtime + 0.25, mtime % 1000, f"user{mtime}"
            entry.mode = (0o777 if name.startswith("run") else 0o666) & ~umask
            packed.addfile(entry, io.BytesIO(name.encode()))
    return path


def test_sdists_of_equal_sources_are_equal(tmp_path: Path) -> None:
    """Whatever the order, times, owners and umask were; what is run stays executable, and an older sdist goes."""
    one = sdist(tmp_path / "one", names=["a.py", "run.sh"], mtime=1_700_000_001, umask=0o022)
    two = sdist(tmp_path / "two", names=["run.sh", "a.py"], mtime=1_800_000_002, umask=0o077)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "quire-0.0.9.tar.gz").touch()
    first = make_sdist(one, tmp_path / "made", MADE).read_bytes()
    again = make_sdist(two, tmp_path / "made", MADE)
    assert again.read_bytes() == first
    assert list((tmp_path / "made").iterdir()) == [again]
    with tarfile.open(again) as packed:
        assert {(m.name, m.mode, m.uid, m.uname, m.mtime) for m in packed} == {
            ("quire-0.1.0/a.py", 0o644, 0, "", MADE.timestamp()),
            ("quire-0.1.0/run.sh", 0o755, 0, "", MADE.timestamp()),
        }


def test_notes_are_the_section_of_the_version_or_what_is_unreleased(tmp_path: Path) -> None:
    """Notes name commit, files, sizes and digests; `sha256sum --check` accepts the checksums."""
    changelog = "# Changelog\n\n## [Unreleased]\n\n- New.\n\n## [0.1.0] - 2026-01-01\n\n- First.\n"
    assert notes.changelog_section(changelog, "0.1.0") == "- First."
    assert notes.changelog_section(changelog, "0.2.0") == "- New."
    file = tmp_path / "quire-0.1.0.tar.gz"
    file.write_bytes(b"packed")
    text = notes.release_notes("0.1.0", "0eccc1f8", "- First.", [file])
    assert hashlib.sha256(b"packed").hexdigest() in text and "`0eccc1f8`" in text and text.endswith("- First.\n")
    (tmp_path / notes.SUMS).write_text(notes.checksums([file]))
    subprocess.run(["sha256sum", "--check", "--strict", notes.SUMS], cwd=tmp_path, check=True, capture_output=True)


def test_our_changelog_has_notes_for_this_release() -> None:
    """Never an empty page beside the files."""
    assert notes.changelog_section((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), "0.1.0")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A clone of this repository's commit, as `make release` begins with."""
    if not (ROOT / ".git").exists():
        pytest.skip("this checkout has no git repository to clone")
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), tmp_path / "clone"], check=True)
    return tmp_path / "clone"


def release(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`make release` in the clone, with this environment's tools."""
    command = [sys.executable, "-m", "deploy.release", "--no-images", *arguments]
    environ = {"PYTHONPATH": "kernels", "PATH": "/usr/bin:/bin", "HOME": str(clone.parent)}
    return subprocess.run(command, cwd=clone, env=environ, capture_output=True, text=True, timeout=3000, check=False)


def test_changes_are_refused(repository: Path) -> None:
    """Files that the commit does not contain cannot be built again from it."""
    (repository / "quire" / "stray.py").touch()
    refused = release(repository)
    assert refused.returncode == 2 and "?? quire/stray.py" in refused.stderr and "--allow-changes" in refused.stderr


def test_time_is_the_commits_unless_it_is_given(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a release made later is the same."""
    told = subprocess.run(
        ["git", "log", "-1", "--format=%cI"], cwd=repository, capture_output=True, text=True, check=True
    )
    monkeypatch.delenv(source.EPOCH_VARIABLE, raising=False)
    assert source.source_time(repository) == datetime.fromisoformat(told.stdout.strip())
    monkeypatch.setenv(source.EPOCH_VARIABLE, "86400")
    assert source.source_time(repository) == datetime(1970, 1, 2, tzinfo=UTC)
