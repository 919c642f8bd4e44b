"""Interface of output parsing: assign each character of one choice's output to a part of the answer.

A parser is fed the output's text, including markers that are special tokens, and returns *spans*: consecutive
runs of characters without gaps, each of one part of the answer. It handles only characters; `Partition` maps
them back to tokens.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class PartKind(Enum):
    """Kinds of parts of an answer."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """Part of an answer. `call`: number of the tool call; its first piece has its `call_id` and `name`."""

    kind: PartKind
    call: int = 0
    call_id: str = ""
    name: str = ""

    def continues(self, other: "AnswerPart") -> bool:
        """True if a piece of this part continues one of `other`."""
        return self.kind is other.kind and self.call == other.call and not self.name

    @property
    def rest(self) -> "AnswerPart":
        """The same part for the pieces after its first."""
        return AnswerPart(self.kind, self.call) if self.name else self


CONTENT = AnswerPart(PartKind.CONTENT)
REASONING = AnswerPart(PartKind.REASONING)


@dataclass(frozen=True, slots=True)
class TextSpan:
    """The next `num_chars` characters of the output.

    `text`: shown in their place: None = they themselves, empty = they are markup.
    """

    num_chars: int
    part: AnswerPart
    text: str | None = None


class OutputParser(Protocol):
    """Parser of one choice's output from its start. Any output is valid: whatever does not match is content."""

    @property
    def markers(self) -> frozenset[str]:
        """Texts that the parser needs even if they are special tokens, which otherwise have no text."""

    @property
    def current(self) -> AnswerPart:
        """Part of a token without text at this point."""

    def feed(self, text: str) -> list[TextSpan]:
        """Add `text`; returns the spans that are certain now.

        They do not depend on how the output is split into texts.
        """

    def end(self) -> list[TextSpan]:
        """Return the rest at the end of the output."""
