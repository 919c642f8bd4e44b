"""Backends by name. A new backend is a module and an entry here; no other code names it."""

import ctypes
import importlib
import logging
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from types import ModuleType

import torch

from paged_kernels.attention_limits import AttentionLimits
from paged_kernels.backend import KernelBackend
from paged_kernels.cpu_compiled import CompiledCpuBackend
from paged_kernels.cpu_library import NoCompiledKernels, load_library
from paged_kernels.cpu_tiles import TiledCpuBackend
from paged_kernels.decoder import DecoderKernels
from paged_kernels.reference import ReferenceBackend
from svc_common.errors import ConfigError

log = logging.getLogger(__name__)

Say = Callable[[str], None]
Maker = Callable[[Mapping[str, str], Say], KernelBackend]
GreedyKernel = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""For float32 logits [n, vocab]: argmax of each row (first if tied), int64 [n], and whether the row is finite, bool [n]."""


def _cpu(environ: Mapping[str, str], say: Say) -> KernelBackend:
    try:
        return CompiledCpuBackend(load_library(environ, say))
    except NoCompiledKernels as error:
        log.warning("CPU kernels run in plain torch, several times slower: %s", error)
        return TiledCpuBackend()


def _reference(_environ: Mapping[str, str], _say: Say) -> KernelBackend:
    return ReferenceBackend()


def _cuda(environ: Mapping[str, str], _say: Say) -> KernelBackend:
    return _triton(environ).make()


def _triton(environ: Mapping[str, str]) -> ModuleType:
    # Optional backend: triton need not be installed.
    try:
        from paged_kernels.gpu import backend as triton_backend  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"the backend cuda needs Triton ({error}): pip install triton", reason="NO_TRITON") from error
    if triton_backend.is_interpreted() != interprets_triton(environ):
        raise ConfigError(
            f"set {INTERPRETER_VARIABLE} before the process starts, not while it runs", reason="NO_TRITON"
        )
    return triton_backend


def _attention(module: str) -> Maker:
    """A library's attention beside the Triton kernels: `make` of a module in gpu/."""

    def make(environ: Mapping[str, str], _say: Say) -> KernelBackend:
        _triton(environ)
        made: KernelBackend = importlib.import_module(f"paged_kernels.gpu.{module}").make()
        return made

    return make


def drawing_kernels(name: str, device: torch.device) -> ModuleType | None:
    """Kernels of the backend `name` that sample without waiting for `device`.

    None if it has none: plain torch is used.
    """
    if name != "cuda" or device.type != "cuda":
        return None
    from paged_kernels.gpu import token_draws  # noqa: PLC0415 (optional, see _cuda)

    return token_draws


def decoder_kernels(backend: KernelBackend) -> DecoderKernels | None:
    """Kernels of `backend` for whole decoders, its `decoder`; None if it has none (a model's own modules then compute)."""
    found: DecoderKernels | None = getattr(backend, "decoder", None)
    return found


def greedy_kernel(backend: KernelBackend) -> GreedyKernel | None:
    """Kernel of `backend` for argmax, its `greedy`; None if it has none (plain torch is used)."""
    found: GreedyKernel | None = getattr(backend, "greedy", None)
    return found


def attention_limits(backend: KernelBackend) -> AttentionLimits | None:
    """What `backend` takes, its `limits`; None if it has none (it takes all that a model may ask for)."""
    found: AttentionLimits | None = getattr(backend, "limits", None)
    return found


def workspace_bytes(backend: KernelBackend) -> int:
    """Device memory that `backend` holds now, its `workspace_bytes`; 0 if it has none."""
    return int(getattr(backend, "workspace_bytes", 0))


def shared_library(backend: KernelBackend) -> ctypes.CDLL | None:
    """Library of `backend` that sums through memory which processes share, its `library`; None if it has none."""
    found: ctypes.CDLL | None = getattr(backend, "library", None)
    return found


def interprets_triton(environ: Mapping[str, str]) -> bool:
    """True if Triton is set to run in its interpreter, on CPU memory. For tests."""
    return environ.get(INTERPRETER_VARIABLE, "0").lower() in {"1", "true", "yes", "on"}


INTERPRETER_VARIABLE = "TRITON_INTERPRET"
BACKENDS: Mapping[str, Maker] = {"cpu": _cpu, "cuda": _cuda, "reference": _reference}


ATTENTION_BACKENDS: Mapping[str, Maker] = {
    "flashinfer": _attention("flashinfer_attention"),
    "flash-attn-3": _attention("flash_attention_3"),
    "torch": _attention("torch_attention"),
}
ENTRY_POINTS = "quire.attention_backends"
"""Group of the entry points, each a Maker, with which other packages add attention backends."""


def attention_backends() -> list[str]:
    """Names for `make_attention_backend`, those of installed packages included."""
    return sorted({*ATTENTION_BACKENDS, *entry_points(group=ENTRY_POINTS).names})


def make_attention_backend(name: str, environ: Mapping[str, str], say: Say) -> KernelBackend:
    """Create the CUDA backend with the attention `name`: of ATTENTION_BACKENDS, else an entry point's.

    Raises ConfigError if there is none, or two packages have that name.
    """
    if name in ATTENTION_BACKENDS:
        return ATTENTION_BACKENDS[name](environ, say)
    found = [*entry_points(group=ENTRY_POINTS, name=name)]
    if len(found) != 1:
        made_by = ", ".join(sorted(point.dist.name if point.dist else point.value for point in found))
        problem = f"is in several packages: {made_by}; uninstall all but one" if found else "is not known"
        raise ConfigError(
            f"--attention-backend {name} {problem}; there are: auto, {', '.join(attention_backends())}",
            reason="NO_ATTENTION_LIBRARY",
        )
    made: KernelBackend = found[0].load()(environ, say)
    return made


def make_backend(name: str, environ: Mapping[str, str], say: Say) -> KernelBackend:
    """Create the backend `name` (a key of BACKENDS; KeyError otherwise). `say` gets a line before slow work."""
    return BACKENDS[name](environ, say)
