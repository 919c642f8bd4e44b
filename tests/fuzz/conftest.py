"""One running stack for the tests of this folder, and what its services complain of."""

from collections.abc import Iterator

import pytest

from quire.local_stack.stack import LocalStack
from tests.fuzz import traces

# What is looked back on is bounded, and filled early, so that growth would be a leak.
GATEWAY_ARGUMENTS = ("--http-header-s", "2", "--http-body-s", "2")
SCHEDULER_ARGUMENTS = ("--record-memory", "4MiB", "--max-logged-steps", "500", "--max-logged-events", "2000")
WORKER_ARGUMENTS = ("--time-scale", "0", "--max-model-len", "64", "--num-gpu-blocks", "256", "--max-adapters", "4")


@pytest.fixture(scope="package")
def log() -> traces.Log:
    return traces.Log()


@pytest.fixture(scope="package")
def stack(log: traces.Log) -> Iterator[LocalStack]:
    """Short contexts, so that what is accepted ends soon."""
    with LocalStack(
        simulated=True,
        worker_args=WORKER_ARGUMENTS,
        scheduler_args=SCHEDULER_ARGUMENTS,
        gateway_args=GATEWAY_ARGUMENTS,
        on_line=log,
    ) as running:
        yield running
