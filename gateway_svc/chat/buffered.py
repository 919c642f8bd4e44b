"""Base of the output parsers: buffered text, a current state, and markers that may be split anywhere."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from gateway_svc.text.output_parser import CONTENT, AnswerPart, TextSpan

MAX_BLANKS = 64
"""Most white space that is held for what may follow it; after more, nothing is expected to follow."""

_BLANKS = re.compile(rf"[ \t\r\n]{{0,{MAX_BLANKS + 1}}}")


class BufferedParser(ABC):
    """Buffer of uncertain characters.

    A state is a method that takes some of them with `take` and returns whether it made progress.
    """

    markers: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._spans: list[TextSpan] = []
        self.buffer = ""
        self.is_over = False
        self.state: Callable[[], bool] = self.in_content
        self.current: AnswerPart = CONTENT

    @abstractmethod
    def in_content(self) -> bool:
        """Initial state."""

    def feed(self, text: str) -> list[TextSpan]:
        """Add text; see OutputParser."""
        self.buffer += text
        return self._run()

    def end(self) -> list[TextSpan]:
        """Return the rest; see OutputParser."""
        self.is_over = True
        spans = self._run()
        assert not self.buffer, "a state has to take everything at the end"
        return spans

    def _run(self) -> list[TextSpan]:
        while self.buffer and self.state():
            pass
        spans, self._spans = self._spans, []
        return spans

    def take(self, num_chars: int, part: AnswerPart, *, text: str | None = None) -> None:
        """Emit the next characters as certain. `text`: shown in their place; empty = they are markup."""
        if num_chars:
            self.buffer = self.buffer[num_chars:]
            self._spans.append(TextSpan(num_chars, part, text))

    def something_behind(self, begin: int = 0) -> tuple[bool | None, int]:
        """True if something other than white space follows `begin`, and its index; None = not known yet, False = no."""
        end = num_blanks(self.buffer, begin) + begin
        if end - begin > MAX_BLANKS:
            return False, end
        return (True if end < len(self.buffer) else False if self.is_over else None), end

    def take_whitespace(self, whitespace: str, part: AnswerPart) -> None:
        """Take leading characters of `whitespace` from the buffer, as markup."""
        self.take(len(self.buffer) - len(self.buffer.lstrip(whitespace)), part, text="")


def num_blanks(text: str, begin: int = 0) -> int:
    """Length of the white space from `begin` on, counted up to MAX_BLANKS + 1."""
    found = _BLANKS.match(text, begin)
    return 0 if found is None else found.end() - begin


def find_marker(text: str, marker: str, lead: str, *, is_over: bool) -> tuple[int, int | None]:
    """Find the first `marker` and return where it begins and ends.

    The begin includes characters of `lead` before the marker. If no marker is found, the end is None and the
    begin is that of a partial marker at the end of the text; with `is_over`, it is the text's end.
    """
    index = text.find(marker)
    if index >= 0:
        return _without_tail(text, index, lead), index + len(marker)
    if is_over:
        return len(text), None
    held = next(n for n in range(min(len(marker) - 1, len(text)), -1, -1) if text.endswith(marker[:n]))
    return _without_tail(text, len(text) - held, lead), None


def find_first(text: str, markers: Iterable[str], lead: str, *, is_over: bool) -> tuple[int, int | None]:
    """`find_marker` for the marker that comes first."""
    found = [find_marker(text, marker, lead, is_over=is_over) for marker in markers]
    complete = [(begin, end) for begin, end in found if end is not None]
    return min(complete) if complete else (min(begin for begin, _ in found), None)


def _without_tail(text: str, end: int, lead: str) -> int:
    """Index where the trailing `lead` characters before `end` begin, at most MAX_BLANKS of them."""
    begin = max(0, end - MAX_BLANKS)
    return begin + len(text[begin:end].rstrip(lead)) if lead else end


def begins_with(text: str, marker: str, *, is_over: bool) -> bool | None:
    """True if `text` begins with `marker`; None = not known yet."""
    if text.startswith(marker):
        return True
    return None if marker.startswith(text) and not is_over else False


def begins_with_one(text: str, markers: Iterable[str], *, is_over: bool) -> str | None:
    """The marker that `text` begins with, empty if with none; None = not known yet."""
    found = {marker: begins_with(text, marker, is_over=is_over) for marker in markers}
    whole = next((marker for marker, begins in found.items() if begins), "")
    return None if not whole and None in found.values() else whole
