"""Quantized checkpoints that tests of a module share."""

import pytest

from tests.worker.model.folders import Folders


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Made when they are asked for."""
    return Folders(tmp_path_factory.mktemp("folders"))
