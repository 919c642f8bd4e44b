"""What one request holds of this gateway while it lasts: entered one by one, left together, in the reverse order, exactly once.

A stream lives long and there are thousands, so this keeps what must be given back and nothing else. contextlib's ExitStack does the
same with a deque and wrappers around each part, a kilobyte for each stream.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Holdings:
    """Owner of the parts."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[AbstractContextManager[object]] = []

    def enter(self, part: AbstractContextManager[T]) -> T:
        """Enters `part`, to be left with the others."""
        value = part.__enter__()
        self._parts.append(part)
        return value

    def leave(self, error: BaseException | None) -> None:
        """Leaves all parts, whatever one of them raises; `error`: what ended the request, None = it is complete."""
        if self._parts:
            try:
                self._parts.pop().__exit__(type(error) if error else None, error, error and error.__traceback__)
            finally:
                self.leave(error)


class Running(Generic[R]):
    """Asynchronous context of a request that `begin` begins, entering in the holdings it is given what must be given back.

    However the context ends, early, by an error or by a cancel, and if beginning fails, all of that is left at once.
    """

    __slots__ = ("_begin", "_holdings")

    def __init__(self, begin: Callable[[Holdings], Awaitable[R]]) -> None:
        self._begin: Callable[[Holdings], Awaitable[R]] | None = begin
        self._holdings = Holdings()

    async def __aenter__(self) -> R:
        begin, self._begin = self._begin, None
        assert begin is not None, "entered twice"
        try:
            return await begin(self._holdings)
        except BaseException as error:
            self._holdings.leave(error)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._holdings.leave(error)
