"""Base of the tool-call parsers: content up to a marker, then calls, then content again."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway_svc.chat.buffered import BufferedParser, find_first, num_blanks
from gateway_svc.chat.tool_calls.json_calls import ArgumentsReader, CallReader, Status
from gateway_svc.chat.tool_calls.parameter_types import ToolTypes
from gateway_svc.text.output_parser import CONTENT, AnswerPart, PartKind

MAX_HELD_CHARS = 16_384
"""Most characters held while waiting for the name of a call that begins with its arguments."""


@dataclass(frozen=True, slots=True)
class CallRules:
    """Rules for calls: tool `names` (None = any), `max_calls` (None = any number), and ids by call number.

    `types`: of the tools' parameters, for formats that write values without their type.
    """

    names: frozenset[str] | None
    call_id: Callable[[int], str]
    max_calls: int | None = None
    types: ToolTypes = field(default_factory=dict)


class CallParser(BufferedParser):
    """Finds one of `openings`; a format parses what follows it (`at_calls`) and what follows each call (`behind_call`).

    Text that proves not to be a call is content, from its opening on. `lead`: characters that are markup
    directly before an opening. `hidden`: markers that are markup wherever they stand in content. Calls beyond
    the allowed number are not visible.
    """

    openings: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    lead = ""

    def __init__(self, rules: CallRules) -> None:
        super().__init__()
        self.rules = rules
        self._num_calls = 0
        self._call_ids: set[str] = set()
        self._call = CONTENT
        self._num_marker_chars = 0
        self._base = 0
        self._reader = CallReader(rules.names)
        self._num_given = 0
        self._arguments = ArgumentsReader()
        self.markers = frozenset(self.openings)

    # --- implemented by formats ------------------------------------------------------------------------------------------

    @abstractmethod
    def at_calls(self) -> bool:
        """State: the buffer begins with an uncertain marker; `held` follows it."""

    @abstractmethod
    def behind_call(self) -> bool:
        """State: a call is complete; the buffer begins after it."""

    # --- used by formats -------------------------------------------------------------------------------------------------

    @property
    def num_before_held(self) -> int:
        """Number of characters before `held`."""
        return self._num_marker_chars + num_blanks(self.buffer, self._num_marker_chars)

    @property
    def held(self) -> str:
        """Uncertain text after the marker, without leading white space."""
        return self.buffer[self.num_before_held :]

    def read_held(self, read: Callable[[], bool]) -> bool:
        """Continue with `read` once `held` is not empty; a marker with nothing after it is no call."""
        is_there, _ = self.something_behind(self._num_marker_chars)
        if is_there is None:
            return False
        return read() if is_there else self.refuse()

    def hold_marker(self, num_chars: int) -> None:
        """Note that the buffer begins with a marker of that length."""
        self._num_marker_chars = num_chars
        self.state = self.at_calls

    def refuse(self) -> bool:
        """Treat the marker as content, since no call follows it, and parse again after it."""
        self.take(self._num_marker_chars, CONTENT)
        self._num_marker_chars = 0
        self.state = self.in_content
        return True

    def is_named(self, name: str) -> bool:
        """True if there is a tool of that name."""
        return bool(name) and (self.rules.names is None or name in self.rules.names)

    def begin_call(self, name: str, num_chars: int, call_id: str = "") -> None:
        """Begin a call: the next `num_chars` are its head, and its arguments follow. `call_id`: as the model wrote it."""
        surplus = self.rules.max_calls is not None and self._num_calls >= self.rules.max_calls
        number = self._num_calls
        self._num_calls += not surplus
        call_id = call_id if call_id and call_id not in self._call_ids else self.rules.call_id(number)
        self._call_ids.add(call_id)
        head = CONTENT if surplus else AnswerPart(PartKind.CALL, number, call_id, name)
        self._call = self.current = head.rest
        self.take(num_chars, head, text="")

    def give(self, num_chars: int, *, text: str | None = None) -> None:
        """Emit the next characters as part of the call. `text`: shown in their place; empty = they are markup."""
        self.take(num_chars, self._call, text="" if self._call is CONTENT else text)

    def end_call(self) -> bool:
        """End the call."""
        self.current = CONTENT
        self._num_marker_chars = 0
        self.state = self.behind_call
        return True

    def read_object(self) -> bool:
        """Switch to the state that reads a call that is a JSON object at the start of `held`."""
        self._base = self.num_before_held
        self._reader = CallReader(self.rules.names)
        self._num_given = 0
        self.state = self._in_object
        return True

    def read_arguments(self) -> None:
        """Switch to the state that reads arguments that are a JSON object, after white space."""
        self._arguments = ArgumentsReader()
        self.state = self._at_json

    # --- states ----------------------------------------------------------------------------------------------------------

    def in_content(self) -> bool:
        """Content up to the next opening."""
        begin, end = find_first(self.buffer, (*self.openings, *self.hidden), self.lead, is_over=self.is_over)
        self.take(begin, CONTENT)
        if end is None:
            return False
        if self.buffer[: end - begin].lstrip(self.lead) in self.hidden:
            self.take(end - begin, CONTENT, text="")
        else:
            self.hold_marker(end - begin)
        return True

    def _in_object(self) -> bool:
        """State: the call is not announced yet, and the reader is ahead of the characters taken."""
        reader = self._reader
        for char in self.buffer[self._base + reader.size :]:
            if reader.status is not Status.READING or reader.is_call or reader.size > MAX_HELD_CHARS:
                break
            reader.feed(char)
        if reader.is_call and reader.status is not Status.BAD and reader.begin is not None:
            self.begin_call(reader.name, self._base + reader.begin)
            self._num_given = reader.begin
            self.state = self._in_call
            return True
        if reader.status is Status.BAD or self.is_over or reader.size > MAX_HELD_CHARS:
            return self.refuse()
        return False

    def _in_call(self) -> bool:
        """State: the call is announced; accepted characters are emitted at once."""
        reader = self._reader
        for char in self.buffer[reader.size - self._num_given :]:
            if reader.status is not Status.READING:
                break
            reader.feed(char)
        in_arguments = reader.size if reader.end is None else reader.end
        self._give_to(in_arguments)
        is_whole = reader.status is Status.DONE or (self.is_over and reader.status is Status.READING)
        self._give_to(reader.size if is_whole else reader.settled, text="")
        if reader.status is Status.READING:
            return False
        return self.end_call()

    def _at_json(self) -> bool:
        """State: the call is announced, its arguments follow white space."""
        self.give(num_blanks(self.buffer), text="")
        self.state = self._in_json
        return True

    def _in_json(self) -> bool:
        """State: in the arguments; accepted characters are emitted at once."""
        num_chars, status = 0, Status.READING
        for char in self.buffer:
            status = self._arguments.feed(char)
            num_chars += status is not Status.BAD
            if status is not Status.READING:
                break
        self.give(num_chars)
        return self.end_call() if status is not Status.READING else False

    def _give_to(self, position: int, *, text: str | None = None) -> None:
        num_chars = position - self._num_given
        if num_chars > 0:
            self.give(num_chars, text=text)
            self._num_given = position
