"""Services of one test never meet connections that were made for those of another."""

import errno
import socket

import pytest

from tests.support.services.harness import run_async, stack


@run_async
async def test_a_port_of_an_ended_stack_is_given_to_no_other() -> None:
    """On a busy machine a port that is free again at once was given to the next service, beside old connections to it."""
    seen: list[int] = []
    for _ in range(2):
        async with stack() as s:
            ports = [int(address.rpartition(":")[2]) for address in (s.address, s.admin_address, s.worker_address)]
        assert not set(ports) & set(seen)
        seen += ports
    for port in seen:
        with socket.socket() as other, pytest.raises(OSError) as error:
            other.bind(("127.0.0.1", port))
        assert error.value.errno == errno.EADDRINUSE
