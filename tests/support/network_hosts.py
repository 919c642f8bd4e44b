"""Hosts with own addresses on one machine: network namespaces on a bridge that reaches nothing else. Linux, root, iproute2."""

import ctypes
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.commands import ROOT, Failure, run
from tests.support.debian import program

_NETWORK = "198.18.0"
"""Of the range that RFC 2544 gives to tests of devices: no machine's own network has it."""
_NAME = f"quire{hashlib.sha256(str(ROOT).encode()).hexdigest()[:6]}"
"""Of the bridge, and the beginning of the other names: a device's has at most 15 characters."""
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_THIS_THREAD = Path("/proc/thread-self/ns/net")


@dataclass(frozen=True)
class NetworkHost:
    """A network namespace with loopback and one address, which this machine and the other hosts reach."""

    name: str
    address: str

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread is inside: sockets that it makes, and processes and threads that it starts, are of this host."""
        before = os.open(_THIS_THREAD, os.O_RDONLY)
        try:
            _enter(Path("/run/netns", self.name))
            yield
        finally:
            _enter(Path(f"/proc/self/fd/{before}"))
            os.close(before)


def _enter(namespace: Path) -> None:
    """setns(2); `os.setns` is of Python 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    with namespace.open("rb") as opened:
        if libc.setns(opened.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"this thread cannot enter {namespace}")


@contextmanager
def network_hosts(count: int) -> Iterator[Sequence[NetworkHost]]:
    """So many, gone afterwards; those that a killed run left are removed first. Failure without the rights."""
    if os.geteuid() != 0:
        raise Failure("root is needed: cells run in network namespaces of their own")
    made = [NetworkHost(f"{_NAME}-{number}", f"{_NETWORK}.{number + 1}") for number in range(1, count + 1)]
    _remove()
    try:
        _ip("link", "add", _NAME, "type", "bridge")
        _ip("address", "add", f"{_NETWORK}.1/24", "dev", _NAME)
        _ip("link", "set", _NAME, "up")
        for host in made:
            _plug_in(host)
        yield made
    finally:
        _remove()


def _plug_in(host: NetworkHost) -> None:
    """A namespace, and a pair of devices between it and the bridge."""
    _ip("netns", "add", host.name)
    _ip("link", "add", host.name, "type", "veth", "peer", "name", "eth0", "netns", host.name)
    _ip("link", "set", host.name, "master", _NAME, "up")
    for words in (("link", "set", "lo", "up"), ("address", "add", f"{host.address}/24", "dev", "eth0")):
        _ip("-n", host.name, *words)
    _ip("-n", host.name, "link", "set", "eth0", "up")


def _remove() -> None:
    """Whatever there is of them."""
    for namespace in Path("/run/netns").glob(f"{_NAME}-*"):
        _ip("netns", "del", namespace.name)
    for device in sorted(Path("/sys/class/net").glob(f"{_NAME}*"), reverse=True):
        run(program("ip"), "link", "del", device.name, check=False)


def _ip(*words: str) -> None:
    run(program("ip"), *words)
