"""On which device these tests run (see tests/support/cuda.py), and the checkpoints that they share."""

import pytest

from tests.support.cuda import TEST_DEVICE, skip_without_device
from tests.worker.engine.families import Families


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    """A checkpoint of each family, by name."""
    return Families(tmp_path_factory.mktemp("families"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_without_device(items, "tests/worker/engine")
    for item in items:
        if TEST_DEVICE != "cpu" and item.path.as_posix().endswith("tests/worker/engine/test_invariance.py"):
            item.add_marker(pytest.mark.skip(reason="the invariance contract is the CPU backend's"))
