"""One running stack for the tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.support.services.served_stack import ServedStack, served_stack


@pytest.fixture(scope="package")
def stack() -> Iterator[ServedStack]:
    """Gateway, scheduler and simulated worker."""
    with served_stack() as running:
        yield running
