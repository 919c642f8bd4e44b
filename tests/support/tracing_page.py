"""What docs/tracing.md says of the names in traces."""

import re
from collections.abc import Iterable, Iterator

from quire.local_stack.otlp_receiver import ReceivedEvent, ReceivedSpan
from scheduler_svc.core.reasons import Reason
from svc_common.observability import trace_names as names
from tests.support.tree import ROOT

_BLOCK = re.compile(r"^```.*?^```$", re.M | re.S)
_CODE = re.compile(r"`([^`]+)`")
_WITH_FREE_NUMBERS = (names.REFUSED, names.FAILED, names.EXPIRED, names.CANCELLED, names.PREEMPTED)
"""Events with the numbers of an error or of a decision, which other pages list."""


def words(name: str) -> set[str]:
    """Everything that a page writes as code."""
    text = _BLOCK.sub("", (ROOT / "docs" / name).read_text(encoding="utf-8"))
    return {word for code in _CODE.findall(text) for word in (code, *re.split(r"[,\s]+", code))}


def undocumented(spans: Iterable[ReceivedSpan]) -> list[str]:
    """Names on these spans that the pages do not have."""
    page, reasons = words("tracing.md"), words("explaining.md")
    found = set[str]()
    for span in spans:
        found |= {name for name in (_span_name(span), *span.attributes) if not _is_known(name, page)}
        for event in span.events:
            found |= set(_unknown_of(event, page, reasons))
    return sorted(found)


def _span_name(span: ReceivedSpan) -> str:
    """As the page writes it."""
    if span.kind == "SERVER":
        return re.sub(r"(?<=Service/)\w+", "METHOD", span.name) if "Service/" in span.name else "POST /v1/..."
    operation, _, model = span.name.partition(" ")
    return f"{operation} MODEL" if model else span.name


def _is_known(name: str, page: set[str]) -> bool:
    return name in page or name.startswith(names.LABEL)


def _unknown_of(event: ReceivedEvent, page: set[str], reasons: set[str]) -> Iterator[str]:
    is_reason = event.name in Reason.__members__
    if event.name not in (reasons if is_reason else page):
        yield event.name
    for name in event.attributes:
        number = name.removeprefix(names.PREFIX)
        if _is_known(name, page) or event.name in _WITH_FREE_NUMBERS or (is_reason and number in reasons):
            continue
        yield f"{event.name}: {name}"
