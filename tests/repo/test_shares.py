"""`make quick` and `make test`: no test is left out, and one that fails in any share fails the command."""

import re
from pathlib import Path

import pytest

from tests import shares
from tests.support.tree import ROOT


def test_every_folder_is_in_one_share() -> None:
    """Listed folders exist, and each is listed once; all else is in the share without a list."""
    for listed in (shares.QUICK, shares.ALL):
        patterns = [pattern for share in listed.values() for pattern in share]
        found = [path for pattern in patterns for path in ROOT.glob(pattern)]
        assert len(set(found)) == len(found) >= len(patterns)
        assert set((ROOT / "tests/core").rglob("test_*.py")) <= {*found, *(f for d in found for f in d.rglob("*.py"))}
    unlisted = [share for share, folders in shares.ALL.items() if not folders]
    assert len(unlisted) == 1
    ignored = {f"--ignore={folder}" for folders in shares.ALL.values() for folder in folders}
    assert set(shares.arguments(unlisted[0], shares.ALL)) == ignored


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
    monkeypatch.setattr(shares, "_LOGS", tmp_path)
    monkeypatch.setattr(shares, "ROOT", tmp_path)
    listed = {"one": ("test_passes.py",), "two": ("test_fails.py",)}
    good, seconds = shares.run(listed, "not long", ["-k", tests, "-p", "no:cacheprovider"])
    assert good is passes
    assert re.fullmatch(r"(one|two) \d+, (one|two) \d+", seconds)
