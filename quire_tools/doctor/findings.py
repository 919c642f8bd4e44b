"""Findings of checks, and their presentation."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from rich.text import Text


class Severity(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `what`: the observation; `to_do`: the remedy, empty if none is needed."""

    state: Severity
    name: str
    what: str
    to_do: str = ""


Check = Callable[[], Iterable[Finding]]

_STYLES = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.PROBLEM: "bold red"}


def ok(name: str, what: str) -> Finding:
    """A finding without remedy."""
    return Finding(Severity.OK, name, what)


def warning(name: str, what: str, to_do: str) -> Finding:
    """A finding of something that works, but incompletely or not as well as it could."""
    return Finding(Severity.WARNING, name, what, to_do)


def problem(name: str, what: str, to_do: str) -> Finding:
    """A finding of something that does not work."""
    return Finding(Severity.PROBLEM, name, what, to_do)


def findings(checks: Sequence[tuple[str, Check]]) -> Iterator[Finding]:
    """Findings of all checks in order; a check that raises becomes a finding too."""
    for name, check in checks:
        try:
            yield from check()
        except Exception as error:  # a broken installation may raise anything
            yield warning(name, f"could not be checked: {type(error).__name__}: {error}", "")


def findings_json(found: Sequence[Finding]) -> dict[str, Any]:
    """The findings as JSON values."""
    return {
        "problems": sum(f.state is Severity.PROBLEM for f in found),
        "findings": [asdict(finding) for finding in found],
    }


def findings_text(found: Sequence[Finding]) -> Text:
    """The findings as text: one line each with the remedy below, and the totals at the end."""
    text = Text()
    width = max((len(finding.name) for finding in found), default=0)
    for finding in found:
        text.append(f"{finding.state:<8}", style=_STYLES[finding.state])
        text.append(f" {finding.name:<{width}}  {finding.what}\n")
        if finding.to_do:
            text.append(f"{'':<8} {'':<{width}}  -> {finding.to_do}\n", style="bold")
    counts = {state: sum(finding.state is state for finding in found) for state in Severity}
    return text.append(", ".join(f"{number} {state}" for state, number in counts.items()))
