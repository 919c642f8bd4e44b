"""Guard against failing parsers: after a failure, the rest of the output is content."""

import logging

from gateway_svc.text.output_parser import CONTENT, AnswerPart, OutputParser, TextSpan

log = logging.getLogger(__name__)


class GuardedParser:
    """OutputParser around another one. If that raises or returns wrong spans, only the parsing ends."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._num_open = 0
        self._has_failed = False
        self.markers: frozenset[str] = parser.markers

    @property
    def current(self) -> AnswerPart:
        """Part of a token without text at this point."""
        return CONTENT if self._has_failed else self._parser.current

    def feed(self, text: str) -> list[TextSpan]:
        """Add text; see OutputParser."""
        self._num_open += len(text)
        return self._guarded(text)

    def end(self) -> list[TextSpan]:
        """Return the rest; see OutputParser."""
        return self._guarded(None)

    def _guarded(self, text: str | None) -> list[TextSpan]:
        if not self._has_failed:
            try:
                spans = self._parser.end() if text is None else self._parser.feed(text)
                num_chars = sum(span.num_chars for span in spans)
                if num_chars > self._num_open or (text is None and num_chars < self._num_open):
                    raise ValueError("a parser has to hand out each character once")
            except Exception as error:
                # Logs neither message nor traceback, since both may contain the output.
                log.error("the parser of an output failed: %s; the rest is content", type(error).__name__)
                self._has_failed = True
            else:
                self._num_open -= num_chars
                return spans
        num_open, self._num_open = self._num_open, 0
        return [TextSpan(num_open, CONTENT)] if num_open else []
