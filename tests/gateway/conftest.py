"""One running stack for the tests of this folder: real gateway and scheduler processes over a simulated worker."""

from collections.abc import Iterator

import pytest

from quire.local_stack.stack import LocalStack


@pytest.fixture(scope="package")
def stack() -> Iterator[LocalStack]:
    """Three processes; the model is called `simulated`, one token per byte, context 4,096."""
    with LocalStack(
        simulated=True, worker_args=("--time-scale", "0.5", "--num-gpu-blocks", "512"), on_line=print
    ) as running:
        yield running
