"""A gRPC channel that adds metadata, such as an API key, to every call."""

from collections.abc import Callable, Sequence
from typing import Any

import grpc


class KeyedChannel:
    """Wraps a blocking `channel`; implements what stubs need of grpc.Channel."""

    def __init__(self, channel: grpc.Channel, metadata: Sequence[tuple[str, str]]) -> None:
        self._channel = channel
        self._metadata = tuple(metadata)

    def close(self) -> None:
        """See grpc.Channel."""
        self._channel.close()

    def unary_unary(self, *how: Any, **more: Any) -> Callable[..., Any]:
        """See grpc.Channel."""
        return self._keyed(self._channel.unary_unary(*how, **more))

    def unary_stream(self, *how: Any, **more: Any) -> Callable[..., Any]:
        """See grpc.Channel."""
        return self._keyed(self._channel.unary_stream(*how, **more))

    def _keyed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def keyed(request: Any, *, metadata: Sequence[tuple[str, str]] = (), **options: Any) -> Any:
            return call(request, metadata=(*metadata, *self._metadata), **options)

        return keyed
