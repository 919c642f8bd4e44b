"""docs/configuration.md says what the commands take."""

import ast
import re

from tests.configuration_page import COMMANDS, PAGE, ROOT, VARIABLES, page


def test_the_page_is_fresh() -> None:
    """`python -m tests.configuration_page --write` would change nothing."""
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.configuration_page --write`"


def test_every_option_is_explained() -> None:
    """No row without a meaning, and every service has its section."""
    made = page()
    rows = [line for line in made.splitlines() if line.startswith("| `--")]
    assert len(rows) > 60
    assert [row for row in rows if row.endswith("|  |")] == []
    assert [name for name in COMMANDS if f"## {name}\n" not in made] == []


def test_every_variable_that_is_read_is_listed() -> None:
    """Strings that look like our or OpenTelemetry's variables, in what is installed."""
    found: set[str] = set()
    for folder in ("quire", "quire_tools", "gateway_svc", "scheduler_svc", "worker_svc", "svc_common"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if "QUIRE_" not in text and "OTEL_" not in text:
                continue  # most sources need no syntax tree
            texts = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
            found |= {t for t in texts if isinstance(t, str) and re.fullmatch(r"(QUIRE|OTEL)_[A-Z_]+", t)}
    assert found <= VARIABLES.keys()
