"""Backends by name. A new one (Triton) is an entry here and a module; nothing else names it."""

import logging
from collections.abc import Callable, Mapping

from paged_kernels.backend import KernelBackend
from paged_kernels.cpu_compiled import CompiledCpuBackend
from paged_kernels.cpu_library import NoCompiledKernels, load_library
from paged_kernels.cpu_tiles import TiledCpuBackend
from paged_kernels.reference import ReferenceBackend

log = logging.getLogger(__name__)

Say = Callable[[str], None]
Maker = Callable[[Mapping[str, str], Say], KernelBackend]


def _cpu(environ: Mapping[str, str], say: Say) -> KernelBackend:
    try:
        return CompiledCpuBackend(load_library(environ, say))
    except NoCompiledKernels as error:
        log.warning("CPU kernels run in plain torch, several times slower: %s", error)
        return TiledCpuBackend()


def _reference(_environ: Mapping[str, str], _say: Say) -> KernelBackend:
    return ReferenceBackend()


BACKENDS: Mapping[str, Maker] = {"cpu": _cpu, "reference": _reference}


def make_backend(name: str, environ: Mapping[str, str], say: Say) -> KernelBackend:
    """The backend `name` (a key of BACKENDS; KeyError otherwise). `say` gets a line when something takes long."""
    return BACKENDS[name](environ, say)
