"""Attention of a library over the pool of the Triton kernels, which do all else: writes, moves, recorded decode steps.

A block is [kv_heads, block_size, head_dim] for keys and for values, which is a page of the layout that FlashInfer calls HND.
"""

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from paged_kernels.attention_limits import AttentionLimits
from paged_kernels.backend import AttentionBatch, AttentionRule, CacheShape
from paged_kernels.gpu.backend import TritonBackend, is_interpreted
from paged_kernels.gpu.backend import make as make_triton
from svc_common.errors import ConfigError

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepSequences:
    """The n sequences that have tokens in a step, on the host, int32 [n]: first packed token, tokens, keys of the last token."""

    begins: Ints
    counts: Ints
    lengths: Ints

    @property
    def is_fresh(self) -> bool:
        """True if all keys of the step are of its own tokens."""
        return bool((self.counts == self.lengths).all())

    @property
    def offsets(self) -> Ints:
        """int32 [n + 1]: packed tokens of each sequence; padding follows."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int32)

    def seen(self, shape: CacheShape, window: int | None) -> "SeenKeys":
        """Which keys the sequences read."""
        first = np.maximum(self.lengths - self.counts - window + 1, 0) if window is not None else 0 * self.lengths
        firsts = first // shape.block_size
        lengths = self.lengths - firsts * shape.block_size
        return SeenKeys(firsts, lengths, -(-lengths // shape.block_size))


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """What is left of n sequences without the pages before their windows: first page, keys, pages; int32 [n].

    Libraries load whole tiles of keys and multiply those before a window by zero; the blocks before it may be other
    requests' by now, with NaN in them. Causal masks and windows depend on distances alone, so those pages are left out.
    """

    firsts: Ints
    lengths: Ints
    num_pages: Ints


class AttentionLibrary(Protocol):
    """Attention by a library. `fresh_only`: for steps in which all keys are of the step's own tokens; Triton has the others."""

    name: str
    limits: AttentionLimits
    fresh_only: bool

    @property
    def workspace_bytes(self) -> int:
        """Device memory that it holds now, for good."""
        ...

    def attend(
        self, query: torch.Tensor, out: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, step: StepSequences,
        shape: CacheShape, rule: AttentionRule,
    ) -> None:  # fmt: skip
        """Attention of `query` [T, heads, head_dim], tokens may be strided, into `out`, contiguous; T without padding.

        `batch.plans` keeps what is computed once for all layers of the step.
        """
        ...


class LibraryBackend(TritonBackend):
    """The Triton backend with a library's attention in steps of lengths that the host knows: all but recorded ones."""

    def __init__(self, library: AttentionLibrary, triton: TritonBackend) -> None:
        super().__init__(triton.sharing)
        self._library = library
        self.name, self.limits = library.name, library.limits

    @property
    def workspace_bytes(self) -> int:
        """See registry.workspace_bytes."""
        return self._library.workspace_bytes

    def takes(self, batch: AttentionBatch) -> bool:
        """True if the library computes this step."""
        step = _sequences(batch)
        return step is not None and len(step.counts) > 0 and (step.is_fresh or not self._library.fresh_only)

    def attend(
        self, query: torch.Tensor, out: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, shape: CacheShape,
        rule: AttentionRule,
    ) -> None:  # fmt: skip
        """See TritonBackend."""
        step = _sequences(batch)
        if step is None or not self.takes(batch):
            super().attend(query, out, cache, batch, shape, rule)
            return
        count = int(batch.offsets[-1])
        if count < len(out):
            out[count:] = 0
        self._library.attend(query[:count], out[:count], cache, batch, step, shape, rule)


def _sequences(batch: AttentionBatch) -> StepSequences | None:
    """None if the host does not know the lengths."""
    if batch.lengths is None:
        return None
    if StepSequences not in batch.plans:
        offsets = batch.offsets.astype(np.int32)
        kept = np.diff(offsets) > 0
        columns = (offsets[:-1], np.diff(offsets), batch.lengths.astype(np.int32))
        batch.plans[StepSequences] = StepSequences(*(column[kept] for column in columns))
    found: StepSequences = batch.plans[StepSequences]
    return found


def pages(cache: torch.Tensor, shape: CacheShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one layer, each [num_blocks, kv_heads, block_size, head_dim]."""
    keys, values = cache.view(2, -1, shape.num_kv_heads, shape.block_size, shape.head_dim)
    return keys, values


def uploaded(device: torch.device, *arrays: Ints) -> list[torch.Tensor]:
    """Copy int32 arrays to the device by one copy, without waiting for it."""
    packed = torch.from_numpy(np.concatenate(arrays)).to(device, non_blocking=True)
    return list(packed.split([len(array) for array in arrays]))


def page_tables(batch: AttentionBatch, begins: torch.Tensor, firsts: torch.Tensor, most_pages: int) -> torch.Tensor:
    """int32 [n, most_pages]: block ids of n sequences from their pages `firsts` on; `begins`: their first packed tokens.

    Behind a sequence's last page there may be any id.
    """
    tables = batch.block_tables[batch.sequences[begins.long()].long()]
    places = firsts.long()[:, None] + torch.arange(most_pages, device=tables.device)
    return tables.gather(1, places.clamp_(max=tables.shape[1] - 1))


def imported(module: str, package: str, name: str) -> ModuleType:
    """The library's module. Raises ConfigError if it cannot be imported."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"--attention-backend {name} needs {package} ({error}): install it, or use --attention-backend auto",
            reason="NO_ATTENTION_LIBRARY",
        ) from error


def make(library: AttentionLibrary) -> LibraryBackend:
    """A backend with this library for this process's device. Raises ConfigError if the device is not taken."""
    triton = make_triton()
    if not is_interpreted():
        capability = torch.cuda.get_device_capability()
        if problem := library.limits.device_problem(capability, is_nvidia=torch.version.hip is None):
            raise ConfigError(
                f"--attention-backend {library.name} {problem}: use --attention-backend auto",
                reason="ATTENTION_UNSUPPORTED",
            )
    return LibraryBackend(library, triton)
