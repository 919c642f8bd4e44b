"""One running stack with the built-in model for the tests of this folder."""

from collections.abc import Iterator

import pytest

from quire.client.sync_client import Client
from quire.local_stack.stack import LocalStack
from tests.support.stack import scheduler_kills
from tests.support.stack.supervised import Supervised, supervised


@pytest.fixture(scope="session")
def stack() -> Iterator[LocalStack]:
    """Three processes serving `models/tiny` in float32."""
    with LocalStack(worker_args=("--dtype", "float32")) as running:
        yield running


@pytest.fixture(scope="session")
def killable() -> Iterator[Supervised]:
    """The same, to be killed: what dies is started again."""
    with supervised(**scheduler_kills.OPTIONS) as running:
        yield running


@pytest.fixture
def client(stack: LocalStack) -> Iterator[Client]:
    """A client of the running stack."""
    with Client(stack.grpc_address) as client:
        yield client
