"""Read single keys from a terminal, without Enter."""

import contextlib
import enum
import importlib
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import Any


class BoundKey(enum.Enum):
    """The keys that have a function."""

    QUIT = "q"
    PAUSE = "p"
    SORT = "s"
    LEFT = "left"
    RIGHT = "right"
    UP = "up"
    DOWN = "down"
    PAGE_UP = "page up"
    PAGE_DOWN = "page down"


_LETTERS = {
    "q": BoundKey.QUIT, "Q": BoundKey.QUIT, "\x04": BoundKey.QUIT,
    "p": BoundKey.PAUSE, "P": BoundKey.PAUSE, " ": BoundKey.PAUSE,
    "s": BoundKey.SORT, "S": BoundKey.SORT, "k": BoundKey.UP, "j": BoundKey.DOWN,
}  # fmt: skip
_SEQUENCES = {
    "D": BoundKey.LEFT,
    "C": BoundKey.RIGHT,
    "A": BoundKey.UP,
    "B": BoundKey.DOWN,
    "5~": BoundKey.PAGE_UP,
    "6~": BoundKey.PAGE_DOWN,
}
_ESCAPES = ("\x1b[", "\x1bO")
_MOST_BYTES = 64


def decode(text: str) -> list[BoundKey]:
    """The keys in what a terminal sent; unknown ones are skipped."""
    found, rest = [], text
    while rest:
        if rest.startswith(_ESCAPES):
            end = next((i for i, c in enumerate(rest[2:], 2) if c.isalpha() or c == "~"), len(rest) - 1)
            key, rest = _SEQUENCES.get(rest[2 : end + 1]), rest[end + 1 :]
        else:
            key, rest = _LETTERS.get(rest[0]), rest[1:]
        found += [key] if key else []
    return found


class Keys:
    """Reads keys from standard input within `ready`. If it is not a terminal there are no keys, and `are_there` is False."""

    def __init__(self) -> None:
        self.are_there = False

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Switch the terminal to single keys without echo; restore it at the end."""
        modes = _terminal_modes()
        if modes is None:
            yield
            return
        termios, number = modes
        before = termios.tcgetattr(number)
        after = termios.tcgetattr(number)
        after[3] &= ~(termios.ICANON | termios.ECHO)
        termios.tcsetattr(number, termios.TCSANOW, after)
        self.are_there = True
        try:
            yield
        finally:
            self.are_there = False
            termios.tcsetattr(number, termios.TCSADRAIN, before)

    def pressed(self, within_s: float) -> list[BoundKey]:
        """Keys pressed, as soon as there are any; empty after `within_s` seconds."""
        if not self.are_there:
            time.sleep(within_s)
            return []
        number = sys.stdin.fileno()
        readable, _, _ = select.select([number], [], [], within_s)
        if not readable:
            return []
        sent = os.read(number, _MOST_BYTES)
        return decode(sent.decode("utf-8", "replace")) if sent else [BoundKey.QUIT]


def _terminal_modes() -> tuple[Any, int] | None:
    """The termios module and the terminal's file descriptor; None without terminal or module."""
    if not sys.stdin.isatty():
        return None
    try:
        return importlib.import_module("termios"), sys.stdin.fileno()
    except ImportError:
        return None
