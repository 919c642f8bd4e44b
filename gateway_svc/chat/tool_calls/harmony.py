"""Parser for gpt-oss's harmony format: messages in channels for reasoning, calls, and the answer.

Own instead of the library `openai-harmony`, which downloads its vocabulary when it is first used, and so needs a network.
"""

import re

from gateway_svc.chat.buffered import begins_with_one, find_first
from gateway_svc.chat.tool_calls.call_parser_base import CallParser, CallRules
from gateway_svc.text.output_parser import CONTENT, REASONING

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, RETURN, CALL, CONSTRAIN = "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"
ENDS = (END, RETURN, CALL)
RECIPIENT, FUNCTIONS = "to=", "functions."
MAX_HEADER_CHARS = 256

_RECIPIENT = re.compile(r"\bto=([\w.:-]+)", re.ASCII)
_ANALYSIS = re.compile(rf"{re.escape(CHANNEL)}\s*analysis\b")


class HarmonyParser(CallParser):
    """Parser for messages `<|channel|>CHANNEL<|message|>TEXT<|end|>`, each but the first after `<|start|>assistant`.

    The text of the channel `analysis` is reasoning, that of a message to `functions.NAME` the arguments of a
    call, other text content. The recipient stands in the channel or before it.
    """

    openings = (CHANNEL, START)
    hidden = ENDS

    def __init__(self, rules: CallRules) -> None:
        super().__init__(rules)
        self.state = self._at_start
        self.markers = frozenset({START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS})

    def _at_start(self) -> bool:
        """State: the first header may begin with the recipient, as in the calls that the chat template shows."""
        is_there, place = self.something_behind()
        begins = begins_with_one(self.buffer[place:], (RECIPIENT,), is_over=self.is_over) if is_there else is_there
        if begins is not None:
            self.state = self.at_calls if begins else self.in_content
        return begins is not None

    def at_calls(self) -> bool:
        """State at a message's header; see CallParser."""
        place = self.buffer.find(MESSAGE, 0, MAX_HEADER_CHARS)
        if place < 0:
            return self.refuse() if self.is_over or len(self.buffer) >= MAX_HEADER_CHARS else False
        header, size = self.buffer[:place], place + len(MESSAGE)
        recipient, is_analysis = _RECIPIENT.search(header), _ANALYSIS.search(header) is not None
        if recipient is not None and (recipient[1].startswith(FUNCTIONS) or not is_analysis):
            return self._at_call(recipient[1].removeprefix(FUNCTIONS), size)
        self.current = REASONING if is_analysis else CONTENT
        self.take(size, self.current, text="")
        self.state = self._in_text
        return True

    def _at_call(self, name: str, size: int) -> bool:
        is_there, place = self.something_behind(size)
        if is_there is None and self.is_named(name):
            return False
        if not (is_there and self.is_named(name) and self.buffer[place] == "{"):
            return self.refuse()
        self.begin_call(name, size)
        self.read_arguments()
        return True

    def behind_call(self) -> bool:
        """State after a call's arguments; see CallParser."""
        is_there, place = self.something_behind()
        end = begins_with_one(self.buffer[place:], ENDS, is_over=self.is_over) if is_there else is_there
        if end is None:
            return False
        self.give(place + len(end or ""), text="")
        self.state = self.in_content
        return True

    def _in_text(self) -> bool:
        """State: in a message that is no call."""
        begin, end = find_first(self.buffer, (*ENDS, START, CHANNEL), "", is_over=self.is_over)
        self.take(begin, self.current)
        if end is None:
            return False
        if self.buffer.startswith(ENDS):
            self.take(end - begin, self.current, text="")
        self.current = CONTENT
        self.state = self.in_content
        return True
