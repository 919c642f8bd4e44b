"""Small HTTP servers: a function from path and query to an answer."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass(slots=True, frozen=True)
class Answer:
    """A body, and what it is."""

    body: bytes
    content_type: str = "application/json"
    status: int = 200


def as_json(value: Any, status: int = 200) -> Answer:
    """`value` as JSON."""
    return Answer(json.dumps(value).encode(), status=status)


def page(title: str, lines: list[str]) -> Answer:
    """A page whose title says what it stands in for."""
    items = "".join(f"<li>{line}</li>" for line in lines)
    text = f"<!doctype html><title>{title}</title><h1>{title}</h1><ul>{items}</ul>"
    return Answer(text.encode(), "text/html; charset=utf-8")


Route = Callable[[str, dict[str, str]], Answer | None]
"""From path and query to an answer; None = there is no such page."""


def serve(address: str, route: Route) -> None:
    """Serves on HOST:PORT in a thread of its own, for the life of the process."""
    host, _, port = address.rpartition(":")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name that http.server asks for
            parts = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            answer = route(parts.path, query) or as_json({"error": "no such page"}, 404)
            self.send_response(answer.status)
            self.send_header("content-type", answer.content_type)
            self.send_header("content-length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing: health checks come every two seconds."""

    server = ThreadingHTTPServer((host, int(port)), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
