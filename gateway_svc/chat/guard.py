"""A parser that fails must not cost its caller the answer: from there on all of it is content."""

import logging

from gateway_svc.text.parts import CONTENT, OutputParser, Part, Span

log = logging.getLogger(__name__)


class GuardedParser:
    """OutputParser around another one. Whatever that raises, or hands out too much of, ends the parsing and nothing else."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._num_open = 0
        self._has_failed = False
        self.markers: frozenset[str] = parser.markers

    @property
    def current(self) -> Part:
        """See OutputParser."""
        return CONTENT if self._has_failed else self._parser.current

    def feed(self, text: str) -> list[Span]:
        """See OutputParser."""
        self._num_open += len(text)
        return self._guarded(text)

    def end(self) -> list[Span]:
        """See OutputParser."""
        return self._guarded(None)

    def _guarded(self, text: str | None) -> list[Span]:
        if not self._has_failed:
            try:
                spans = self._parser.end() if text is None else self._parser.feed(text)
                num_chars = sum(span.num_chars for span in spans)
                if num_chars > self._num_open or (text is None and num_chars < self._num_open):
                    raise ValueError("a parser has to hand out each character once")
            except Exception as error:
                # Neither its message nor its traceback: both may have the output in them.
                log.error("the parser of an output failed: %s; the rest is content", type(error).__name__)
                self._has_failed = True
            else:
                self._num_open -= num_chars
                return spans
        num_open, self._num_open = self._num_open, 0
        return [Span(num_open, CONTENT)] if num_open else []
