"""How the ranks of a group find each other: rank 0 listens, the others call it until it takes them."""

import json
import logging
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from paged_kernels.ranks import PeerLost
from svc_common.errors import ConfigError, PermissionDenied
from svc_common.net import peer_sockets
from svc_common.net.tls_settings import WORKER
from svc_common.version import VERSION
from worker_svc.ranks.channel import Channel, MessageKind, config_error, error_message
from worker_svc.ranks.member import GroupRanks, host_id
from worker_svc.settings import WorkerSettings, option_of

log = logging.getLogger(__name__)

_HELLO_S = 5.0
_RETRY_S = 0.1
_EQUAL = (
    *(
        "tensor_parallel",
        "pipeline_parallel",
        "dtype",
        "kv_cache_dtype",
        "quantization",
        "quantization_group",
        "max_model_len",
        "block_size",
    ),
    *("backend", "invariant", "fuse", "max_adapters", "max_adapter_rank"),
)
"""Settings that must be equal on all ranks."""


def hello_of(settings: WorkerSettings) -> dict[str, Any]:
    """What a rank says of itself."""
    given = settings.model_dump(mode="json")
    return {
        "version": VERSION,
        "rank": settings.rank,
        "host": host_id(),
        "settings": {name: given[name] for name in _EQUAL},
    }


def _check_hello(own: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """The other's rank. Raises ConfigError, with both values, if it cannot be in the group."""
    rank, size = int(other["rank"]), own["settings"]["tensor_parallel"] * own["settings"]["pipeline_parallel"]
    if own["version"] != other["version"]:
        raise config_error(f"rank 0 has version {own['version']}, rank {rank} version {other['version']}")
    for name, value in own["settings"].items():
        if other["settings"].get(name) != value:
            raise config_error(
                f"{option_of(name)} is {value} at rank 0 and {other['settings'].get(name)} at rank {rank}: start all ranks "
                "with the same",
                field=name,
            )
    if not 0 < rank < size:
        raise config_error(f"--rank {rank} is not one of the {size - 1} that rank 0 waits for: 1 to {size - 1}")
    return rank


class Meeting:
    """Rank 0's listener."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Listen. Raises ConfigError if the port is taken, or plain text would leave this machine."""
        self._settings, self._own = settings, hello_of(settings)
        self._joined: dict[int, tuple[Channel, str]] = {}
        peer_sockets.check(settings.peers, settings.host, "listening for ranks on")
        try:
            self._listener = socket.create_server((settings.host, settings.group_port))
        except OSError as error:
            raise ConfigError(
                f"port {settings.group_port} on {settings.host} is in use or not allowed; choose another with --group-port "
                "(0 = any free port)",
                reason="PORT_IN_USE",
                metadata={"port": str(settings.group_port)},
            ) from error
        self._listener.settimeout(_RETRY_S)

    @property
    def port(self) -> int:
        """Port of the listener."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop listening. Those that joined stay connected."""
        self._listener.close()

    def wait(self, on_joined: Any, stop: threading.Event) -> tuple[GroupRanks, list[Channel]]:
        """Wait until all ranks have joined; `on_joined(count)` when one has. Raises ConfigError for one that cannot, PeerLost
        if `stop` is set meanwhile."""
        size = self._settings.num_ranks
        while len(self._joined) < size - 1:
            if stop.is_set():
                raise PeerLost("rank 0 stops before all ranks have joined")
            self._accept()
            on_joined(1 + len(self._joined))
        channels = [self._joined[rank][0] for rank in range(1, size)]
        hosts = [self._own["host"], *(self._joined[rank][1] for rank in range(1, size))]
        for rank, channel in enumerate(channels, 1):
            channel.send(MessageKind.WELCOME, json.dumps({"num_on_host": hosts.count(hosts[rank])}).encode())
        return _group(self._settings, channels, hosts.count(hosts[0])), channels

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except TimeoutError:
            self._drop_broken()
            return
        try:
            connection.settimeout(_HELLO_S)
            self._take(connection)
        except (OSError, PermissionDenied, PeerLost, KeyError, ValueError, TypeError) as error:
            log.warning("a connection from %s is refused: %s", address[0], error)
            connection.close()

    def _drop_broken(self) -> None:
        for rank, (channel, _) in list(self._joined.items()):
            if channel.is_broken():
                channel.close()
                del self._joined[rank]

    def _take(self, connection: socket.socket) -> None:
        channel = Channel(peer_sockets.accepted(self._settings.peers, connection, WORKER), "a rank")
        other = json.loads(channel.expect(MessageKind.HELLO, _HELLO_S))
        try:
            rank = _check_hello(self._own, other)
        except ConfigError as error:
            channel.send(MessageKind.REFUSED, error_message(error))
            channel.close()
            raise
        self._drop_broken()
        if rank in self._joined:
            raise PeerLost(f"rank {rank} has joined already")
        channel.peer = f"rank {rank}"
        self._joined[rank] = channel, str(other["host"])


def join(settings: WorkerSettings, stop: threading.Event) -> tuple[GroupRanks, Channel] | None:
    """Call rank 0 until it takes this rank, and wait for the others; None if `stop` is set meanwhile.

    Raises ConfigError if rank 0 refuses it.
    """
    host, _, port = settings.leader.rpartition(":")
    peer_sockets.check(settings.peers, host, "joining rank 0 at")
    while not stop.is_set():
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=_HELLO_S)
        except OSError:
            stop.wait(_RETRY_S)
            continue
        channel = None
        try:
            channel = Channel(peer_sockets.connected(settings.peers, connection, WORKER, host), "rank 0")
            channel.send(MessageKind.HELLO, json.dumps(hello_of(settings)).encode())
            welcome = json.loads(channel.expect(MessageKind.WELCOME))
            return _group(settings, [channel], int(welcome["num_on_host"])), channel
        except (OSError, PeerLost) as error:
            # Of an earlier life, or rank 0 has ended.
            log.debug("rank 0 at %s does not take this rank: %s", settings.leader, error)
            (channel or connection).close()
            time.sleep(_RETRY_S)
    return None


def _group(settings: WorkerSettings, channels: list[Channel], num_on_host: int) -> GroupRanks:
    host = settings.leader.rpartition(":")[0].strip("[]") if settings.rank else settings.host
    return GroupRanks(
        settings.rank,
        settings.num_ranks,
        channels,
        tensor_size=settings.tensor_parallel,
        num_on_host=num_on_host,
        leader_host="localhost" if host in {"0.0.0.0", "::"} else host,
        host=channels[0].own_host,
        timeout_s=settings.rank_timeout_s,
        peers=settings.peers,
    )
