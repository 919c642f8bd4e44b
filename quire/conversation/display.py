"""Shows an answer on the terminal as it streams: reasoning dimmed, then the text, then tool calls."""

import sys

from quire.client.outputs import Delta, RequestOutput, ToolCall
from quire.client.streams import Stream

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class AnswerDisplay:
    """Writes an answer to standard output.

    If that is not a terminal, writes only the text of the answer, and tool calls, one per line.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._thinks = False

    def show(self, stream: Stream) -> RequestOutput:
        """Read the stream to its end. Ctrl-C cancels the request and is raised again."""
        try:
            for delta in stream:
                self._piece(delta)
        except KeyboardInterrupt:
            stream.cancel()
            self._end_thinking()
            self._write("\n")
            raise
        except BaseException:
            self._end_thinking()
            raise
        self._end_thinking()
        answer = stream.result.outputs[0]
        self._write("\n" if answer.text or not answer.tool_calls else "")
        for call in answer.tool_calls:
            self._write(f"-> {call_text(call)}\n")
        return stream.result

    def _piece(self, delta: Delta) -> None:
        if delta.reasoning and self._is_terminal:
            self._write(("" if self._thinks else _DIM) + delta.reasoning)
            self._thinks = True
        if delta.text:
            self._end_thinking()
            self._write(delta.text)

    def _end_thinking(self) -> None:
        if self._thinks:
            self._write(f"{_PLAIN}\n")
        self._thinks = False

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def call_text(call: ToolCall) -> str:
    """ "name(arguments)"."""
    return f"{call.name}({call.arguments})"
