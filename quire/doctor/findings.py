"""What a check found, and how it is shown."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from rich.text import Text


class State(StrEnum):
    """How it is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `what`: what was seen; `to_do`: what helps, empty where nothing has to be done."""

    state: State
    name: str
    what: str
    to_do: str = ""


Check = Callable[[], Iterable[Finding]]

_STYLES = {State.OK: "green", State.WARNING: "yellow", State.PROBLEM: "bold red"}


def ok(name: str, what: str) -> Finding:
    """Nothing to do."""
    return Finding(State.OK, name, what)


def warning(name: str, what: str, to_do: str) -> Finding:
    """It works, but not as well as it could, or not everything does."""
    return Finding(State.WARNING, name, what, to_do)


def problem(name: str, what: str, to_do: str) -> Finding:
    """It does not work."""
    return Finding(State.PROBLEM, name, what, to_do)


def findings(checks: Sequence[tuple[str, Check]]) -> Iterator[Finding]:
    """Of all checks, in their order; a check that fails itself is a finding too."""
    for name, check in checks:
        try:
            yield from check()
        except Exception as error:  # a broken installation breaks in any way
            yield warning(name, f"could not be checked: {type(error).__name__}: {error}", "")


def findings_json(found: Sequence[Finding]) -> dict[str, Any]:
    """For programs."""
    return {
        "problems": sum(f.state is State.PROBLEM for f in found),
        "findings": [asdict(finding) for finding in found],
    }


def findings_text(found: Sequence[Finding]) -> Text:
    """For people: a line each, what to do below it, the sum at the end."""
    text = Text()
    width = max((len(finding.name) for finding in found), default=0)
    for finding in found:
        text.append(f"{finding.state:<8}", style=_STYLES[finding.state])
        text.append(f" {finding.name:<{width}}  {finding.what}\n")
        if finding.to_do:
            text.append(f"{'':<8} {'':<{width}}  -> {finding.to_do}\n", style="bold")
    counts = {state: sum(finding.state is state for finding in found) for state in State}
    return text.append(", ".join(f"{number} {state}" for state, number in counts.items()))
