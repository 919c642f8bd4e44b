"""Parsers for the tool-call formats of Hermes and Qwen, Llama 3, and Mistral. How one is chosen: `format_choice`."""

import re

from gateway_svc.chat.buffered import begins_with
from gateway_svc.chat.tool_calls.call_parser_base import CallParser, CallRules
from gateway_svc.chat.tool_calls.json_calls import WHITESPACE, ArgumentsReader, Status
from gateway_svc.text.output_parser import CONTENT

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class HermesParser(CallParser):
    """Parser for any number of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere."""

    marker = HERMES_OPEN
    lead = "\r\n"

    def __init__(self, rules: CallRules) -> None:
        super().__init__(rules)
        self.markers = frozenset({HERMES_OPEN, HERMES_CLOSE})

    def at_calls(self) -> bool:
        """State after the opening marker; see CallParser."""
        return self.read_held(self.read_object)

    def behind_call(self) -> bool:
        """Take the closing marker, complete or cut off by the end of the output."""
        is_there, place = self.something_behind()
        text = self.buffer[place:]
        closes = begins_with(text, HERMES_CLOSE, is_over=self.is_over) if is_there else is_there
        if closes is None:
            return False
        if closes or HERMES_CLOSE.startswith(text):
            self.give(place + min(len(HERMES_CLOSE), len(text)), text="")
        self.state = self._behind_calls
        return True

    def _behind_calls(self) -> bool:
        self.take_whitespace(WHITESPACE, CONTENT)
        self.state = self.in_content if self.buffer else self.state
        return bool(self.buffer)


class Llama3Parser(CallParser):
    """Parser for Llama 3's calls, `{"name": ..., "parameters": {...}}`.

    They stand at the start of the output or after `<|python_tag|>`; several are separated by `;`.
    """

    marker = PYTHON_TAG

    def __init__(self, rules: CallRules) -> None:
        super().__init__(rules)
        self.state = self._at_start

    def _at_start(self) -> bool:
        is_there, place = self.something_behind()
        if is_there is None:
            return False
        self.state = self.at_calls if is_there and self.buffer[place] == "{" else self.in_content
        return True

    def at_calls(self) -> bool:
        """State after the marker; see CallParser."""
        return self.read_held(self.read_object)

    def behind_call(self) -> bool:
        """Expect another call after a semicolon or tag, else content."""
        is_there, place = self.something_behind()
        text = self.buffer[place:] if is_there else ""
        if text.startswith((";", PYTHON_TAG)):
            separator = ";" if text.startswith(";") else PYTHON_TAG
            self.hold_marker(place + len(separator))
            return True
        if is_there is None or (text and begins_with(text, PYTHON_TAG, is_over=self.is_over) is None):
            return False
        self.take(place, CONTENT, text="")
        self.state = self.in_content
        return True


class MistralParser(CallParser):
    """Parser for Mistral's calls.

    Reads `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and `[TOOL_CALLS]name[ARGS]{...}` once per
    call.
    """

    marker = TOOL_CALLS

    def __init__(self, rules: CallRules) -> None:
        super().__init__(rules)
        self.markers = frozenset({TOOL_CALLS, ARGS, CALL_ID})
        self._arguments = ArgumentsReader()
        self._is_list = False

    def at_calls(self) -> bool:
        """State after the marker; see CallParser."""
        return self.read_held(self._begin)

    def _begin(self) -> bool:
        if self.held.startswith("["):
            self._is_list = True
            self.hold_marker(self.num_before_held + 1)
            self.state = self._at_object
        else:
            self._is_list = False
            self.state = self._at_name
        return True

    def _at_object(self) -> bool:
        return self.read_held(self.read_object)

    def _at_name(self) -> bool:
        found = _HEAD.match(self.held)
        if found is not None and self.is_named(found[1]):
            self.begin_call(found[1], self.num_before_held + found.end())
            self._arguments = ArgumentsReader()
            self.state = self._in_arguments
            return True
        if self.is_over or _HEAD_SO_FAR.fullmatch(self.held) is None or found is not None:
            return self.refuse()
        return False

    def _in_arguments(self) -> bool:
        num_chars, status = 0, Status.READING
        for char in self.buffer:
            status = self._arguments.feed(char)
            num_chars += status is not Status.BAD
            if status is not Status.READING:
                break
        self.give(num_chars)
        return self.end_call() if status is not Status.READING else False

    def behind_call(self) -> bool:
        """Expect another call, the end of the list, or content."""
        is_there, place = self.something_behind()
        if is_there is None:
            return False
        text = self.buffer[place:] if is_there else ""
        if self._is_list and text.startswith(","):
            self.hold_marker(place + 1)
            self.state = self._at_object
            return True
        is_end = self._is_list and text.startswith("]")
        self.give(place + is_end, text="")
        self.state = self.in_content
        return True


_PARTIAL_ARGS = "|".join(re.escape(ARGS[:n]) for n in range(len(ARGS), 0, -1))
_PARTIAL_ID = "|".join(re.escape(CALL_ID[:n]) for n in range(len(CALL_ID), 0, -1))
_HEAD = re.compile(r"([\w.-]{1,64})\s{0,8}(?:\[CALL_ID\]\w{0,64}\s{0,8})?(?:\[ARGS\]\s{0,8}(?=\{)|(?=\{))", re.ASCII)
_HEAD_SO_FAR = re.compile(
    rf"[\w.-]{{1,64}}\s{{0,8}}(?:(?:{_PARTIAL_ID})|\[CALL_ID\]\w{{0,64}}\s{{0,8}})?(?:(?:{_PARTIAL_ARGS})\s{{0,8}})?",
    re.ASCII,
)
