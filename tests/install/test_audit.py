"""`make audit`: what its exit status means."""

import pytest

from tests.install.audit import Verdict

SOUND = {"name": "h11", "version": "0.16.0", "vulns": []}
UNKNOWN = {"name": "quire-private", "skip_reason": "Dependency not found"}
FLAWED = {"name": "h11", "version": "0.14.0", "vulns": [{"id": "GHSA-vqfr-h8mv-ghfj", "fix_versions": ["0.16.0"]}]}


@pytest.mark.parametrize(
    ("packages", "status"),
    [([SOUND], 0), ([SOUND, FLAWED], 1), ([UNKNOWN, FLAWED], 1), ([SOUND, UNKNOWN], 2), ([UNKNOWN], 2), ([], 2)],
)
def test_the_status_is_0_only_if_all_were_looked_up(packages: list[dict], status: int) -> None:
    """Reports in the form of pip-audit 2.10."""
    assert Verdict.of({"dependencies": packages, "fixes": []}).status == status


def test_a_vulnerability_is_named_with_its_repair() -> None:
    """The line says which package, which advisory, which release."""
    (line,) = Verdict.of({"dependencies": [FLAWED], "fixes": []}).vulnerable
    assert line == "h11 0.14.0: GHSA-vqfr-h8mv-ghfj, repaired in 0.16.0"
