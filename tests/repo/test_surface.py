"""Nothing that users or programs can name is lost or changed by accident."""

import difflib

from tests.repo.surface.__main__ import KEPT, surface


def test_the_surface_is_the_kept_one() -> None:
    """Commands, options, metrics, names in traces, reasons, variables, RPCs, routes, fields, Python's API and the keys of policies.

    After a wanted change: `python -m tests.repo.surface --write`, and a line in CHANGELOG.md for what is gone.
    """
    kept, now = KEPT.read_text(encoding="utf-8").splitlines(), surface().splitlines()
    assert kept == now, "\n".join(line for line in difflib.ndiff(kept, now) if line[0] in "+-")


def test_each_kind_of_name_is_kept() -> None:
    """The list has all kinds, so a kind that is no longer found fails above."""
    kinds = {line.partition(" ")[0] for line in KEPT.read_text(encoding="utf-8").splitlines()}
    assert kinds == {
        *("command", "option", "metric", "trace", "reason", "word", "python", "variable", "header", "path", "logger"),
        *("rpc", "field", "enum", "route", "json", "policy", "tour", "make", "extra"),
    }
