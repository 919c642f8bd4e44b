"""The compiled kernels as this machine builds them, and, in long runs, as they are built for other machines."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from paged_kernels.cpu_compiled import CompiledCpuBackend
from paged_kernels.cpu_library import load_library, main


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    """Libraries that were loaded so far, by build."""
    return {}


@pytest.fixture(scope="session", params=["native", pytest.param("portable", marks=pytest.mark.long)])
def library(request, libraries, tmp_path_factory) -> ctypes.CDLL:
    """Built for this processor, and by the command that builds for others."""
    build = request.param
    if build not in libraries and build == "native":
        libraries[build] = load_library(os.environ, lambda _: None)
    elif build not in libraries:
        path = tmp_path_factory.mktemp("portable") / "kernels.so"
        assert main([str(path)]) == 0
        libraries[build] = load_library({"QUIRE_KERNEL_LIBRARY": str(path)}, lambda _: None)
    return libraries[build]


@pytest.fixture(scope="session")
def compiled(library) -> CompiledCpuBackend:
    """The compiled backend of each build."""
    return CompiledCpuBackend(library)


@pytest.fixture
def threads():
    """`with threads(n):` computes with n threads."""

    @contextmanager
    def computing(count: int) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    return computing
