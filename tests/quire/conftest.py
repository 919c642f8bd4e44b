"""One running stack for the tests of this folder that need no other."""

from collections.abc import Iterator

import pytest

from quire.local_stack.stack import LocalStack


@pytest.fixture(scope="package")
def simulated_stack() -> Iterator[LocalStack]:
    """Gateway, scheduler and a simulated worker, as `quire up --simulated` starts them."""
    with LocalStack(simulated=True) as running:
        yield running
