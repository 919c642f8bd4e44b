"""A stand-in for the hub on 127.0.0.1: the part of its HTTP API that a download uses, over folders of a test."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = {"main", COMMIT, "v1"}


@dataclass(slots=True)
class Hub:
    """Models by name, as folders. `gated`: names that want a token; `broken`: files whose first answer ends in the middle.

    `asked`: (method, path, Range) of every request.
    """

    models: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    url: str = ""

    @contextmanager
    def serving(self) -> Iterator["Hub"]:
        """Listens on a free port while inside."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def files(self, name: str) -> list[Path]:
        """Of a model, by their paths in it."""
        folder = self.models[name]
        return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Quiet."""

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            hub.asked.append((self.command, path, self.headers.get("Range", "")))
            parts = path.split("/")
            api = parts[:2] == ["api", "models"]
            name = "/".join(parts[2:4] if api else parts[:2])
            rest = parts[4:] if api else parts[2:]
            if name not in hub.models:
                return self._refuse(404, "RepoNotFound")
            if name in hub.gated:
                return self._refuse(403, "GatedRepo")
            if len(rest) > 1 and rest[1] not in REVISIONS:
                return self._refuse(404, "RevisionNotFound")
            if api:
                return self._json(self._listing(name) if rest[:1] == ["tree"] else self._model(name))
            return self._file(hub.models[name] / "/".join(rest[2:]), body=body)

        def _model(self, name: str) -> dict[str, object]:
            sizes = {str(file): (hub.models[name] / file).stat().st_size for file in hub.files(name)}
            siblings = [{"rfilename": file, "size": size} for file, size in sizes.items()]
            return {"id": name, "sha": COMMIT, "siblings": siblings}

        def _listing(self, name: str) -> list[dict[str, object]]:
            sizes = {file: (hub.models[name] / file).stat().st_size for file in hub.files(name)}
            return [
                {"type": "file", "path": str(file), "size": size, "oid": hashlib.sha1(str(file).encode()).hexdigest()}
                for file, size in sizes.items()
            ]

        def _file(self, path: Path, *, body: bool) -> None:
            if not path.is_file():
                return self._refuse(404, "EntryNotFound")
            content = path.read_bytes()
            start = int(self.headers.get("Range", "bytes=0-")[6:].split("-")[0])
            self.send_response(206 if start else 200)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Accept-Ranges", "bytes")
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            if body and path.name in hub.broken:
                hub.broken.discard(path.name)
                self.wfile.write(content[: len(content) // 2])
                self.close_connection = True
            elif body:
                self.wfile.write(content[start:])

        def _json(self, value: object) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler
