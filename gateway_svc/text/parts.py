"""The seam of output parsing: which part of an answer each character of one choice's output belongs to.

A parser is fed with the output's text, markers that are special tokens included, and hands out *spans*: runs of characters in
order, without a gap, each of one part of the answer. It knows characters alone; `Partition` brings tokens back in.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class PartKind(Enum):
    """What a piece of output is."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class Part:
    """The part of an answer that a piece belongs to. `call`: number of the call; its first piece has its `call_id` and `name`."""

    kind: PartKind
    call: int = 0
    call_id: str = ""
    name: str = ""

    def continues(self, other: "Part") -> bool:
        """Whether a piece of this part goes on where one of `other` ended."""
        return self.kind is other.kind and self.call == other.call and not self.name

    @property
    def rest(self) -> "Part":
        """The same part behind its first piece."""
        return Part(self.kind, self.call) if self.name else self


CONTENT = Part(PartKind.CONTENT)
REASONING = Part(PartKind.REASONING)


@dataclass(frozen=True, slots=True)
class Span:
    """The next `num_chars` characters of the output. Those that are not `visible` only mark where something begins or ends."""

    num_chars: int
    part: Part
    visible: bool = True


class OutputParser(Protocol):
    """Parses the output of one choice from its start. Nothing in an output is an error: what does not fit is content."""

    @property
    def markers(self) -> frozenset[str]:
        """Texts that matter to it even where they are special tokens, which have no text elsewhere."""

    @property
    def current(self) -> Part:
        """What a token without text belongs to at this point."""

    def feed(self, text: str) -> list[Span]:
        """Goes on with `text`; the spans that are certain now. They do not depend on how the output is cut into texts."""

    def end(self) -> list[Span]:
        """The rest, when the output is over."""
