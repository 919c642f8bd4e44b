"""What parsers are made of: text that is not certain yet, a state that looks at it, and markers that may be cut anywhere."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable

from gateway_svc.text.parts import CONTENT, Part, Span

MAX_BLANKS = 64
"""White space that may wait for what comes behind it; of more, nothing comes."""

_BLANKS = re.compile(rf"[ \t\r\n]{{0,{MAX_BLANKS + 1}}}")


class BufferedParser(ABC):
    """Owner of the characters that are not certain yet. A state takes some of them by `take` and says whether it got on."""

    markers: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self.buffer = ""
        self.is_over = False
        self.state: Callable[[], bool] = self.in_content
        self.current: Part = CONTENT

    @abstractmethod
    def in_content(self) -> bool:
        """The first state."""

    def feed(self, text: str) -> list[Span]:
        """See OutputParser."""
        self.buffer += text
        return self._run()

    def end(self) -> list[Span]:
        """See OutputParser."""
        self.is_over = True
        spans = self._run()
        assert not self.buffer, "a state has to take everything at the end"
        return spans

    def _run(self) -> list[Span]:
        while self.buffer and self.state():
            pass
        spans, self._spans = self._spans, []
        return spans

    def take(self, num_chars: int, part: Part, *, visible: bool = True) -> None:
        """The next characters are certain."""
        if num_chars:
            self.buffer = self.buffer[num_chars:]
            self._spans.append(Span(num_chars, part, visible))

    def something_behind(self, begin: int = 0) -> tuple[bool | None, int]:
        """Whether there is more than white space from `begin` on, and where; None = cannot be said yet, False = it is not."""
        end = num_blanks(self.buffer, begin) + begin
        if end - begin > MAX_BLANKS:
            return False, end
        return (True if end < len(self.buffer) else False if self.is_over else None), end

    def take_whitespace(self, whitespace: str, part: Part) -> None:
        """Takes what the buffer begins with of these characters, as a part of markup."""
        self.take(len(self.buffer) - len(self.buffer.lstrip(whitespace)), part, visible=False)


def num_blanks(text: str, begin: int = 0) -> int:
    """White space from `begin` on, as far as it is counted: one more than MAX_BLANKS."""
    found = _BLANKS.match(text, begin)
    return 0 if found is None else found.end() - begin


def find_marker(text: str, marker: str, lead: str, *, is_over: bool) -> tuple[int, int | None]:
    """Where the first `marker` begins, characters of `lead` before it included, and where it ends; None = not there.

    Without it: what may be its beginning, at the end of the text; nothing of it where the text is over.
    """
    index = text.find(marker)
    if index >= 0:
        return _without_tail(text, index, lead), index + len(marker)
    if is_over:
        return len(text), None
    held = next(n for n in range(min(len(marker) - 1, len(text)), -1, -1) if text.endswith(marker[:n]))
    return _without_tail(text, len(text) - held, lead), None


def _without_tail(text: str, end: int, lead: str) -> int:
    """Where the last of `lead`, MAX_BLANKS at most, begin in the text before `end`."""
    begin = max(0, end - MAX_BLANKS)
    return begin + len(text[begin:end].rstrip(lead)) if lead else end


def begins_with(text: str, marker: str, *, is_over: bool) -> bool | None:
    """Whether `text` begins with `marker`; None = cannot be said yet."""
    if text.startswith(marker):
        return True
    return None if marker.startswith(text) and not is_over else False
