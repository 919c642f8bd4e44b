"""Web origins whose pages may call the OpenAI door from a browser (CORS). An ASGI application around the door's."""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

_SHOWN_HEADERS = ("x-request-id", "x-trace-id", "retry-after", "retry-after-ms", "openai-processing-ms")


def with_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """`app`, which answers pages of these origins; without any it is unchanged, and browsers keep its answers from pages.

    Keys are sent as a header that the page sets; cookies are not used, so credentials stay off.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=_SHOWN_HEADERS,
    )
