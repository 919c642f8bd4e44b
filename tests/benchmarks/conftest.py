"""One running stack for the tests of this folder."""

from collections.abc import Iterator

import pytest

from quire.local_stack.stack import LocalStack


@pytest.fixture(scope="package")
def stack() -> Iterator[LocalStack]:
    """Gateway, scheduler and a simulated worker at no cost."""
    with LocalStack(simulated=True, worker_args=("--time-scale", "0")) as running:
        yield running
