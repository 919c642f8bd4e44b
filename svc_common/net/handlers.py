"""Wrap gRPC handlers with a check that an interceptor runs before each call."""

import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from svc_common.net import rpc

Handler = Any
Before = Callable[[Any, Any], Any]
"""Takes the request (for a stream: its iterator) and the context; returns the request to continue with.

A QuireError ends the call.
"""


def behind(handler: Handler, before: Before, *, deserializer: Callable[[bytes], Any] | None) -> Handler:
    """Return `handler` with `before` run first in each call.

    Generators stay generators and coroutines stay coroutines.
    """
    kinds: Sequence[tuple[str, Callable[..., Any]]] = (
        ("unary_unary", grpc.unary_unary_rpc_method_handler),
        ("unary_stream", grpc.unary_stream_rpc_method_handler),
        ("stream_unary", grpc.stream_unary_rpc_method_handler),
        ("stream_stream", grpc.stream_stream_rpc_method_handler),
    )
    for kind, make in kinds:
        behaviour = getattr(handler, kind)
        if behaviour is not None:
            return make(_behind(behaviour, before), deserializer, handler.response_serializer)
    raise AssertionError("a handler has one behaviour")


def _behind(behaviour: Callable[..., Any], before: Before) -> Callable[..., Any]:
    async def answer(request: Any, context: Any) -> Any:
        async with rpc.errors_to_status(context):
            request = before(request, context)
        return await behaviour(request, context)

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        async with rpc.errors_to_status(context):
            request = before(request, context)
        async with contextlib.aclosing(behaviour(request, context)) as messages:
            async for message in messages:
                yield message

    return generate if inspect.isasyncgenfunction(behaviour) else answer
