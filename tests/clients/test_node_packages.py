"""Tests that need Node say so where it is missing, and fail where it must not be."""

import pytest

from tests.support.node import node_packages


@pytest.fixture
def no_node(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without Node, of a person."""
    for name, value in (("PATH", "/nowhere"), ("NEED_NODE", ""), ("CI", "")):
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_without_node_they_are_skipped(no_node: pytest.MonkeyPatch) -> None:
    """With a reason that says what to install."""
    with pytest.raises(pytest.skip.Exception, match="install Node 20 or newer"):
        node_packages("tools")


@pytest.mark.parametrize("name", ["NEED_NODE", "CI"])
def test_where_it_is_needed_they_fail(no_node: pytest.MonkeyPatch, name: str) -> None:
    """CI cannot lose them silently."""
    no_node.setenv(name, "true")
    with pytest.raises(pytest.fail.Exception, match="install Node 20 or newer"):
        node_packages("tools")
