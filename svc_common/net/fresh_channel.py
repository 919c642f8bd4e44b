"""gRPC channel that is replaced for new calls, so that renewed certificates and new addresses need no restart."""

import asyncio
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio

_FOR_AS_LONG_AS_THEY_TAKE_S = 10 * 365 * 86_400.0


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class CurrentValue(Protocol[T_co]):
    """What a channel is made of."""

    def current(self) -> T_co:
        """Return it as it is now: the same object until it changes."""
        ...


class FreshChannel(grpc.aio.Channel, Generic[T]):
    """Wraps one real channel at a time, made by `make(contents)`; a replaced one closes when its calls are over."""

    def __init__(self, watched: CurrentValue[T], make: Callable[[T], grpc.aio.Channel]) -> None:
        self._watched = watched
        self._make = make
        self._contents = watched.current()
        self._channel = make(self._contents)
        self._leaving: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    def _current(self) -> grpc.aio.Channel:
        contents = self._watched.current()
        if contents is not self._contents:
            # Closed gracefully: a stream cancelled on this side would look like a task's own cancellation.
            task = asyncio.ensure_future(self._channel.close(_FOR_AS_LONG_AS_THEY_TAKE_S))
            self._leaving[task] = self._channel
            task.add_done_callback(self._leaving.pop)
            self._contents, self._channel = contents, self._make(contents)
        return self._channel

    async def close(self, grace: float | None = None) -> None:
        """End calls in flight after `grace` seconds, None = at once."""
        leaving = list(self._leaving.items())
        for task, _ in leaving:
            task.cancel()
        await asyncio.gather(*(task for task, _ in leaving), return_exceptions=True)
        for _, channel in leaving:
            await channel.close(None)
        await self._channel.close(grace)

    async def __aenter__(self) -> "FreshChannel[T]":
        return self

    async def __aexit__(self, kind: Any, error: Any, traceback: Any) -> None:
        await self.close(None)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Connectivity of the current channel."""
        return self._current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the current channel leaves that state."""
        await self._current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the current channel is ready."""
        await self._current().channel_ready()

    def _late(self, kind: str, how: tuple[Any, ...], more: dict[str, Any]) -> Any:
        """Return the callable that a stub keeps for one method; each call uses the current channel."""

        def call(*arguments: Any, **options: Any) -> Any:
            return getattr(self._current(), kind)(*how, **more)(*arguments, **options)

        return call

    def unary_unary(self, *how: Any, **more: Any) -> Any:
        """Make a callable for a unary-unary method."""
        return self._late("unary_unary", how, more)

    def unary_stream(self, *how: Any, **more: Any) -> Any:
        """Make a callable for a unary-stream method."""
        return self._late("unary_stream", how, more)

    def stream_unary(self, *how: Any, **more: Any) -> Any:
        """Make a callable for a stream-unary method."""
        return self._late("stream_unary", how, more)

    def stream_stream(self, *how: Any, **more: Any) -> Any:
        """Make a callable for a stream-stream method."""
        return self._late("stream_stream", how, more)
