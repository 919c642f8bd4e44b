"""Triton reads TRITON_INTERPRET when it is imported, so these tests have a process of their own.

They are collected only where that process was set up: by `tests/kernels/test_triton.py` (TRITON_INTERPRET=1, CPU tensors), by
`tests/worker/test_fake_cuda.py` (the simulated device's tensors) or by `make test-cuda` (QUIRE_TEST_DEVICE=cuda; skipped where
there is no such device).
"""

import os

import pytest

from tests.support.attention_packages import attention_packages
from tests.support.cuda import skip_without_device

__all__ = ["attention_packages"]

collect_ignore_glob = [] if {"TRITON_INTERPRET", "QUIRE_TEST_DEVICE"} & os.environ.keys() else ["test_*.py"]

if "TRITON_INTERPRET" in os.environ:
    from tests.support.triton_interpreter import patch_once_per_launch

    patch_once_per_launch()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_without_device(items, "tests/kernels/triton")
