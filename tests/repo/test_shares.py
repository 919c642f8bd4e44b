"""`make quick` and `make test`: no test is left out, and one that fails in any share fails the command."""

import re
from pathlib import Path

import pytest

from tests import shares
from tests.support.tree import ROOT


def collected(share: str, listed: shares.Shares) -> set[Path]:
    """Test files that pytest finds with the share's arguments."""
    given = shares.arguments(share, listed)
    ignored = {ROOT / argument.removeprefix("--ignore=") for argument in given if argument.startswith("--")}
    folders = {ROOT / argument for argument in given if not argument.startswith("--")} or {ROOT / "tests"}
    found = {path for folder in folders for path in ([folder] if folder.is_file() else folder.rglob("test_*.py"))}
    return {path for path in found if not ignored & {path, *path.parents}}


def test_every_file_is_in_one_share() -> None:
    """Whatever the lists have is there, and each file is collected once: all of them for `make test`."""
    for listed, _ in shares.TIERS.values():
        assert all(any(ROOT.glob(pattern)) for patterns in listed.values() for pattern in patterns)
        files = [path for share in listed for path in collected(share, listed)]
        assert len(set(files)) == len(files)
        assert set(files) >= set((ROOT / "tests/core" if listed is shares.QUICK else ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize(
    ("tests", "passes"),
    [
        ("test_passes", True),
        pytest.param("nothing_is_called_so", True, marks=pytest.mark.long),
        ("FAILS or test_passes", False),
    ],
)
def test_a_share_that_fails_fails_all(
    tests: str, passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is; a share without a matching test does not."""
    (tmp_path / "test_passes.py").write_text("def test_passes() -> None: ...\n", encoding="utf-8")
    (tmp_path / "test_fails.py").write_text("def test_FAILS() -> None:\n    assert False\n", encoding="utf-8")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(shares, "_LOGS", tmp_path)
    monkeypatch.setattr(shares, "ROOT", tmp_path)
    listed = {"one": ("test_passes.py",), "two": ("test_fails.py",)}
    good, seconds = shares.run(listed, "not long", ["-k", tests, "-p", "no:cacheprovider"])
    assert good is passes
    assert re.fullmatch(r"(one|two) \d+, (one|two) \d+", seconds)
