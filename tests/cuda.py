"""QUIRE_TEST_DEVICE=cuda (`make test-cuda`): tests of kernels and of the worker's engine on a GPU instead of the CPU."""

import os
from collections.abc import Iterable

import pytest
import torch

TEST_DEVICE = os.environ.get("QUIRE_TEST_DEVICE", "cpu")


def skip_without_device(items: Iterable[pytest.Item], folder: str) -> None:
    """Where a CUDA device is asked for and there is none, the tests below `folder` are skipped and say so."""
    if TEST_DEVICE == "cuda" and not torch.cuda.is_available():
        for item in items:
            if f"/{folder}/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="QUIRE_TEST_DEVICE=cuda, but torch sees no CUDA device"))
