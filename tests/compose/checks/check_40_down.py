"""`docker compose down -v` leaves nothing in the engine. (What the engine leaves on the machine, tests.compose looks at itself.)"""

from tests.compose.checks.conftest import Figures, Stacks
from tests.compose.stack import Stack, docker


def test_down_leaves_nothing(cpu: Stack, stacks: Stacks, figures: Figures) -> None:
    """No container, no volume, and of networks only those that every engine has."""
    assert docker("ps", "--quiet")
    assert docker("volume", "ls", "--quiet").split()
    figures.note("down_s", stacks.end())
    assert docker("ps", "--all", "--quiet").split() == []
    assert docker("volume", "ls", "--quiet").split() == []
    assert sorted(docker("network", "ls", "--format", "{{.Name}}").split()) == ["bridge", "host", "none"]
