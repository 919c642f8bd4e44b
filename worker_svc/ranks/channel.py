"""Messages between two ranks over a socket: a kind and bytes. Blocking; one thread sends, one receives."""

import contextlib
import json
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum

from paged_kernels.ranks import PeerLost
from svc_common import errors
from svc_common.errors import ConfigError, Internal, QuireError

_HEAD = struct.Struct("<IB")
MOST_BYTES = 2**30
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 5))


class MessageKind(IntEnum):
    """What a message is."""

    HELLO = 1
    """Follower: JSON of what must be equal (`joining.py`)."""
    WELCOME = 2
    """Leader: JSON of the group."""
    REFUSED = 3
    """Leader: JSON of an error; the connection ends."""
    CALL = 4
    """Leader: JSON of an engine's call."""
    STEP = 5
    """Leader: a serialised SchedulerOutputs."""
    ANSWER = 6
    """Follower: the result of a call, or digests of a step."""
    FAILED = 7
    """Follower: JSON of the error of a call."""
    EXCHANGE = 8
    """Both: bytes of one rank, then of all; see RankPlace.exchange."""
    GOODBYE = 9
    """Leader: it stops in order."""
    FINISH = 10
    """Leader: the oldest step in flight is to be finished and answered. Only with several stages."""
    TOKENS = 11
    """Last stage to leader, leader to the others: what a decode step drew."""
    STATES = 12
    """A stage to the next: hidden states of a forward pass."""
    LINK = 13
    """A rank to one of another stage: which rank it is, and what the connection is for."""


class Channel:
    """Owner of a connected socket. `peer`: for messages, such as "rank 1"."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.peer = peer
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        """See socket.fileno."""
        return self._socket.fileno()

    @property
    def own_host(self) -> str:
        """Address of this end."""
        return str(self._socket.getsockname()[0])

    def send(self, kind: MessageKind, content: bytes = b"", timeout_s: float | None = None) -> None:
        """Send one message. Raises PeerLost, also if the peer does not take it within `timeout_s`."""
        try:
            if timeout_s is not None:
                self._socket.settimeout(timeout_s)
            self._socket.sendall(_HEAD.pack(len(content), kind) + content)
        except TimeoutError as error:
            raise PeerLost(f"{self.peer} did not receive within {timeout_s:g} s") from error
        except OSError as error:
            raise self._lost(error) from error

    def receive(self, timeout_s: float | None = None) -> tuple[MessageKind, bytes]:
        """The next message. Raises PeerLost if the peer is gone or silent for `timeout_s`."""
        try:
            self._socket.settimeout(timeout_s)
            size, kind = _HEAD.unpack(self._read(_HEAD.size))
            if size > MOST_BYTES:
                raise PeerLost(f"{self.peer} sent a message of {size} bytes; at most {MOST_BYTES} are allowed")
            return MessageKind(kind), self._read(size)
        except TimeoutError as error:
            raise PeerLost(f"{self.peer} did not answer within {timeout_s:g} s") from error
        except (OSError, ValueError) as error:
            raise self._lost(error) from error
        finally:
            with contextlib.suppress(OSError):  # closed meanwhile
                self._socket.settimeout(None)

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._socket.recv(min(size - len(parts), 2**20))
            if not part:
                raise ConnectionError("its process has ended")
            parts += part
        return bytes(parts)

    def _lost(self, error: Exception) -> PeerLost:
        return PeerLost(f"{self.peer} is lost: {error}")

    def expect(self, kind: MessageKind, timeout_s: float | None = None) -> bytes:
        """The next message, of this kind. Raises PeerLost, or the peer's own error."""
        found, content = self.receive(timeout_s)
        if found in (MessageKind.FAILED, MessageKind.REFUSED):
            raise error_of(content)
        if found is not kind:
            raise PeerLost(f"{self.peer} sent {found.name} where {kind.name} was expected", differs=True)
        return content

    def is_broken(self) -> bool:
        """True if the peer has closed its side."""
        poll = select.poll()
        poll.register(self.fileno(), CLOSED)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the socket; the peer notices at once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


CLOSED = getattr(select, "POLLRDHUP", select.POLLHUP) | select.POLLHUP | select.POLLERR
"""Events of `select.poll` on a socket without a peer any more, also while what that sent is unread."""


class RankWatch:
    """Calls `on_lost` once, on its thread, when the connection of one of `channels` ends. Reads nothing."""

    def __init__(self, channels: Sequence[Channel], on_lost: Callable[[PeerLost], None]) -> None:
        self._channels, self._on_lost = channels, on_lost
        self._end, self._ends = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread without a call."""
        os.close(self._ends)
        self._thread.join(1.0)

    def _watch(self) -> None:
        poll, peers = select.poll(), {channel.fileno(): channel.peer for channel in self._channels}
        for number in peers:
            poll.register(number, CLOSED)
        poll.register(self._end, select.POLLIN | select.POLLHUP)
        number = poll.poll()[0][0]
        if number in peers:
            self._on_lost(PeerLost(f"{peers[number]} is lost: its process has ended"))
        os.close(self._end)


def error_message(error: BaseException) -> bytes:
    """The content of FAILED or REFUSED."""
    known = error if isinstance(error, QuireError) else Internal(f"{type(error).__name__}: {error}")
    return json.dumps(
        {
            "type": type(known).__name__,
            "message": known.message,
            "reason": known.reason,
            "metadata": dict(known.metadata),
        }
    ).encode()


def error_of(content: bytes) -> QuireError:
    """The error in such a content."""
    found = json.loads(content)
    cls = getattr(errors, found["type"], None)
    if not (isinstance(cls, type) and issubclass(cls, QuireError)):
        cls = Internal
    kind: type[QuireError] = cls
    error = kind(found["message"], metadata=found["metadata"])
    error.reason = found["reason"]
    return error


def config_error(message: str, **metadata: str) -> ConfigError:
    """The error for ranks that cannot be a group."""
    return ConfigError(message, reason="RANK_SETTINGS", metadata=metadata)
