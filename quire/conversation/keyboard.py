"""Terminal input of one or several lines, with line editing, persistent history and completion of commands."""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_BLOCK = '"""'
_MAX_HISTORY = 2_000
PROMPT, MORE = "> ", "... "


def state_folder() -> Path:
    """Folder for the program's state, by the XDG convention."""
    given = os.environ.get("XDG_STATE_HOME", "")
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".local" / "state") / "quire"


class Keyboard:
    """Reads turns from standard input.

    A line that ends in a backslash continues; \"\"\" begins and ends a turn of several lines. Uses line
    editing on a terminal; `history`: file that keeps it, None = not kept.
    """

    def __init__(self, *, history: Path | None, words: Sequence[str] = ()) -> None:
        self.is_terminal = sys.stdin.isatty()
        self._history, self._words = history, words
        self._editor: Any = None

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Set up line editing; write the history at the end."""
        if not self.is_terminal:
            yield
            return
        with contextlib.suppress(ImportError):  # not in every build of Python
            self._editor = importlib.import_module("readline")
            self._set_up()
        try:
            yield
        finally:
            self._write_history()

    def turn(self) -> str | None:
        """The next turn; None at the end of input. KeyboardInterrupt discards a partly typed turn."""
        line = self._line(PROMPT)
        if line is not None and line.strip().startswith(_BLOCK):
            return self._block(line.strip().removeprefix(_BLOCK))
        lines = []
        while line is not None and line.endswith("\\"):
            lines.append(line[:-1])
            line = self._line(MORE)
        return line if not lines else "\n".join([*lines, line or ""])

    def _block(self, first: str) -> str:
        """Read up to the line that ends in the mark, or to the end of input."""
        lines, line = [], first
        while not line.rstrip().endswith(_BLOCK):
            lines.append(line)
            following = self._line(MORE)
            if following is None:
                return "\n".join(lines).strip("\n")
            line = following
        return "\n".join([*lines, line.rstrip().removesuffix(_BLOCK)]).strip("\n")

    def _line(self, prompt: str) -> str | None:
        try:
            return input(prompt if self.is_terminal else "")
        except EOFError:
            return None

    def _set_up(self) -> None:
        if self._history is not None:
            with contextlib.suppress(OSError):
                self._editor.read_history_file(str(self._history))
        self._editor.set_history_length(_MAX_HISTORY)
        self._editor.set_completer_delims(" \t\n")
        self._editor.set_completer(self._complete)
        self._editor.parse_and_bind("tab: complete")

    def _complete(self, text: str, state: int) -> str | None:
        found = [word for word in self._words if text.startswith("/") and word.startswith(text)]
        return found[state] if state < len(found) else None

    def _write_history(self) -> None:
        if self._editor is None or self._history is None:
            return
        with contextlib.suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._history.touch(mode=0o600)
            self._editor.write_history_file(str(self._history))
