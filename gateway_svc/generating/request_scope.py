"""Resources that one request holds at this gateway.

They are entered one by one and released together, in reverse order, exactly once. There are thousands of long
streams, so this keeps only what must be released. contextlib's ExitStack does the same with a deque and
wrappers around each part, about a kilobyte per stream.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


@dataclass(slots=True)
class RequestScope:
    """Stack of entered context managers."""

    _parts: list[AbstractContextManager[object]] = field(default_factory=list)

    def enter(self, part: AbstractContextManager[T]) -> T:
        """Enter `part`; `leave` exits it with the others."""
        value = part.__enter__()
        self._parts.append(part)
        return value

    def leave(self, error: BaseException | None) -> None:
        """Exit all parts, even if one raises. `error`: the error that ended the request, None = it is complete."""
        if self._parts:
            try:
                self._parts.pop().__exit__(type(error) if error else None, error, getattr(error, "__traceback__", None))
            finally:
                self.leave(error)


@dataclass(slots=True)
class Running(Generic[R]):
    """Asynchronous context of a request.

    `begin` starts the request and enters what must be released in the scope passed to it. Everything
    entered is released as soon as the context ends, also on an error or a cancel, and if `begin` fails.
    """

    begin: Callable[[RequestScope], Awaitable[R]] | None
    _scope: RequestScope = field(default_factory=RequestScope)

    async def __aenter__(self) -> R:
        begin, self.begin = self.begin, None
        assert begin is not None, "entered twice"
        try:
            return await begin(self._scope)
        except BaseException as error:
            self._scope.leave(error)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._scope.leave(error)
