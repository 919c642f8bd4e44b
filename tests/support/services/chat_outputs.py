"""What models write, for tests of parsers: parsed at any cut, as merged parts."""

import itertools
from collections.abc import Callable, Sequence

from gateway_svc.chat.parsing import ChatParsing
from gateway_svc.text.output_parser import OutputParser, PartKind, TextSpan

NAMES = ("get_weather", "add")

Parts = list[tuple[str, str, str]]
"""(kind, name of a call with its number before it, visible text), neighbours of one part merged."""


def parsing(
    tool_format: str = "none", *, reasoning: str = "none", is_open: bool = False, max_calls: int | None = None
) -> ChatParsing:
    """With two tools."""
    return ChatParsing(tool_format, NAMES, max_calls, reasoning, is_open, "salt")


def cut(text: str, points: Sequence[int]) -> list[str]:
    """`text` in pieces that end at those points."""
    edges = [0, *sorted(min(p, len(text)) for p in points), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges) if a < b]


def parsed(make: Callable[[], OutputParser | None], texts: Sequence[str]) -> Parts:
    """The parts of an output that comes in these texts. Its characters are all told of, once, in order."""
    parser = make()
    assert parser is not None
    spans: list[TextSpan] = [span for text in texts for span in parser.feed(text)] + parser.end()
    whole = "".join(texts)
    assert sum(span.num_chars for span in spans) == len(whole)
    return merged(spans, whole)


def merged(spans: Sequence[TextSpan], text: str) -> Parts:
    """Spans of an output as parts; those of markup alone are left out."""
    parts: Parts = []
    names: dict[int, str] = {}
    place = 0
    for span in spans:
        part, visible = span.part, text[place : place + span.num_chars] if span.text is None else span.text
        place += span.num_chars
        if part.name:
            names[part.call] = part.name
        name = f"{part.call}:{names[part.call]}" if part.kind is PartKind.CALL else ""
        if parts and parts[-1][:2] == (part.kind.value, name):
            parts[-1] = (*parts[-1][:2], parts[-1][2] + visible)
        else:
            parts.append((part.kind.value, name, visible))
    kept = [part for part in parts if part[1] or part[2]]
    return _joined(kept)


def _joined(parts: Parts) -> Parts:
    joined: Parts = []
    for part in parts:
        if joined and joined[-1][:2] == part[:2]:
            joined[-1] = (*part[:2], joined[-1][2] + part[2])
        else:
            joined.append(part)
    return joined
