"""TLS credentials of gRPC servers, gRPC channels and HTTP listeners, from certificate files.

Files are reloaded when they change. New connections use the current files, open ones go on. Unusable files
(half written, of two different pairs) are logged, and the last valid ones stay in force. Permissions are in
`peers` and `gateway_svc.access`, settings in `tls_settings`.
"""

import logging
import os
import ssl
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from svc_common.errors import ConfigError

log = logging.getLogger(__name__)

_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost", "::1"})


def is_loopback(host: str) -> bool:
    """True if only this machine can reach `host`; names other than localhost count as reachable from elsewhere."""
    bare = host.strip("[]").lower()
    return bare in _LOOPBACK_NAMES or (bare.startswith("127.") and bare.replace(".", "").isdigit())


def host_of(address: str) -> str:
    """The host of HOST:PORT; unix sockets count as localhost."""
    return "localhost" if address.startswith("unix:") else address.rpartition(":")[0]


def refuse_plain_text(host: str, *, what: str, instead: str) -> None:
    """Raise ConfigError if plain text would leave this machine.

    `what`: the unprotected use; `instead`: the options that change it.
    """
    if not is_loopback(host):
        raise ConfigError(
            f"{what} {host} would be plain text that others on the network can read; give {instead}, or --insecure where the "
            "network is private",
            reason="PLAIN_TEXT",
            metadata={"host": host},
        )


@dataclass(frozen=True, slots=True)
class TlsContents:
    """PEM contents of one side's files: its certificate chain, its key, and the CA that it trusts. None = not given."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None

    def check(self) -> None:
        """Raise ValueError or OSError if unusable: not PEM, or a key of another certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if self.ca is not None:
            context.load_verify_locations(cadata=self.ca.decode("ascii"))
        _load_pair(context, self)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of one side's files."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def read(self) -> TlsContents:
        """Read and check the files. Raises OSError or ValueError."""
        ca, cert, key = (None if path is None else path.read_bytes() for path in (self.ca, self.cert, self.key))
        contents = TlsContents(ca, cert, key)
        contents.check()
        return contents

    def version(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Value that changes when a file does; None for an inaccessible one."""
        return tuple(_version(path) for path in (self.ca, self.cert, self.key) if path is not None)

    def __str__(self) -> str:
        return ", ".join(str(path) for path in (self.ca, self.cert, self.key) if path is not None)


class WatchedFiles:
    """Last valid contents of some files; thread-safe. Raises ConfigError if they are unusable at first."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._version = files.version()
        try:
            self._contents = files.read()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the certificates cannot be used ({files}): {error}; `quire certs DIR` makes some to try with",
                reason="BAD_CERTIFICATES",
            ) from None

    def current(self) -> TlsContents:
        """Contents for a new connection; the same object while nothing changed."""
        with self._lock:
            version = self._files.version()
            if version != self._version:
                self._version = version
                self._reread()
            return self._contents

    def _reread(self) -> None:
        try:
            self._contents = self._files.read()
        except (OSError, ValueError) as error:
            log.warning("changed certificates cannot be used, the old ones stay in force (%s): %s", self._files, error)
        else:
            log.info("certificates were read again: %s", self._files)


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _load_pair(context: ssl.SSLContext, contents: TlsContents) -> None:
    """Load certificate and key into `context`, through short-lived private files, since the library reads only files."""
    if contents.cert is None or contents.key is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, name) for name in ("cert", "key")]
        for path, part in zip(paths, (contents.cert, contents.key), strict=True):
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(part)
        # A server has no terminal, so an encrypted key is an error instead of a password prompt.
        context.load_cert_chain(paths[0], paths[1], password=_no_password)


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one without a password")


# --- gRPC ------------------------------------------------------------------------------------------------------------


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials for `add_secure_port`; with a `ca`, clients need a certificate signed by it."""
    watched = WatchedFiles(files)
    fetch = _ConfigurationFetcher(watched)
    return grpc.dynamic_ssl_server_credentials(
        _configuration(watched.current()), fetch, require_client_authentication=files.ca is not None
    )


class _ConfigurationFetcher:
    """Configuration callback that gRPC calls on its own thread before each handshake."""

    def __init__(self, watched: WatchedFiles) -> None:
        self._watched = watched
        self._given = watched.current()

    def __call__(self) -> Any:
        """Return the new configuration, or None if unchanged."""
        current = self._watched.current()
        if current is self._given:
            return None
        self._given = current
        return _configuration(current)


def _configuration(contents: TlsContents) -> Any:
    return grpc.ssl_server_certificate_configuration(
        [(contents.key or b"", contents.cert or b"")], root_certificates=contents.ca
    )


def channel_credentials(contents: TlsContents) -> grpc.ChannelCredentials:
    """Credentials for a channel; without `ca`, gRPC's built-in public CAs are trusted."""
    return grpc.ssl_channel_credentials(contents.ca, contents.key, contents.cert)


def expects(name: str) -> list[tuple[str, Any]]:
    """Channel options: the server's certificate must be for `name` instead of the address's host. Empty = the host."""
    return [("grpc.ssl_target_name_override", name)] if name else []


# --- HTTP ------------------------------------------------------------------------------------------------------------


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """TLS context for an HTTP server; with a `ca`, clients need a certificate signed by it.

    Each handshake uses the current files.
    """
    watched = WatchedFiles(files)
    context = _server_context(watched.current())
    context.sni_callback = _current_context(watched, context)
    return context


def _server_context(contents: TlsContents) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load_pair(context, contents)
    if contents.ca is not None:
        context.load_verify_locations(cadata=contents.ca.decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _current_context(
    watched: WatchedFiles, first: ssl.SSLContext
) -> Callable[[ssl.SSLObject, str | None, ssl.SSLContext], None]:
    """Callback for the start of a handshake, with or without a server name in it."""
    made = (watched.current(), first)

    def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal made
        contents = watched.current()
        if contents is not made[0]:
            made = (contents, _server_context(contents))
        connection.context = made[1]

    return choose
