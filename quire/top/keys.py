"""Keys of a person at a terminal, one at a time, without Enter."""

import contextlib
import enum
import importlib
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import Any


class Key(enum.Enum):
    """Keys that mean something."""

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
    "q": Key.QUIT, "Q": Key.QUIT, "\x04": Key.QUIT,
    "p": Key.PAUSE, "P": Key.PAUSE, " ": Key.PAUSE,
    "s": Key.SORT, "S": Key.SORT, "k": Key.UP, "j": Key.DOWN,
}  # fmt: skip
_SEQUENCES = {"D": Key.LEFT, "C": Key.RIGHT, "A": Key.UP, "B": Key.DOWN, "5~": Key.PAGE_UP, "6~": Key.PAGE_DOWN}
_ESCAPES = ("\x1b[", "\x1bO")
_MOST_BYTES = 64


def decode(text: str) -> list[Key]:
    """The keys in what a terminal sent; what means nothing is left out."""
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
    """Reads standard input while it is `ready`. Where that is no terminal there are no keys, and `are_there` is false."""

    def __init__(self) -> None:
        self.are_there = False

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """The terminal gives single keys and shows none; as it was before at the end."""
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

    def pressed(self, within_s: float) -> list[Key]:
        """Those that were pressed, as soon as there are some; none after that time."""
        if not self.are_there:
            time.sleep(within_s)
            return []
        number = sys.stdin.fileno()
        readable, _, _ = select.select([number], [], [], within_s)
        if not readable:
            return []
        sent = os.read(number, _MOST_BYTES)
        return decode(sent.decode("utf-8", "replace")) if sent else [Key.QUIT]


def _terminal_modes() -> tuple[Any, int] | None:
    """The module that changes them and the terminal's number; None where there is no terminal, or no such module."""
    if not sys.stdin.isatty():
        return None
    try:
        return importlib.import_module("termios"), sys.stdin.fileno()
    except ImportError:
        return None
