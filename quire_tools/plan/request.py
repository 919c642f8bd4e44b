"""From the user's options to a plan: device, its memory, and settings checked as a worker checks them."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from paged_kernels.attention_limits import workspace_of
from paged_kernels.quantized import FLOAT8
from quire.sizes import GIB
from quire_tools.plan.fits import MemoryPlan, MemoryQuestion, make_plan
from quire_tools.plan.head_sizes import head_bytes
from quire_tools.plan.model_sizes import ModelSizes, Rounding, model_sizes
from quire_tools.plan.picture import plan_json, plan_picture
from worker_svc.device.choice import choose_device
from worker_svc.device.devices import CUDA_DEVICES, HOST
from worker_svc.settings import AUTO, WorkerSettings

__all__ = ["Wanted", "answered", "plan_json", "plan_picture"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The user's options. `memory` None = what this machine, or its GPU, has free; `name` empty = the folder's.

    `worker`: fields of WorkerSettings that were given.
    """

    folder: Path
    name: str
    memory: int | None
    worker: Mapping[str, Any]
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2_048


def answered(wanted: Wanted) -> MemoryPlan:
    """The plan. Raises ConfigError for settings that a worker would refuse, and for a model that cannot be served."""
    settings = WorkerSettings.of(model=wanted.folder, **wanted.worker)
    where = _where(settings, wanted)
    sizes = _sizes(wanted.folder, settings, settings.max_model_len, on_cuda=where.on_cuda)
    draft_block_bytes = 0
    if settings.draft_model is not None:
        drafts = _sizes(settings.draft_model, settings, sizes.max_model_len, on_cuda=where.on_cuda)
        draft_block_bytes = drafts.block_bytes(drafts.num_layers, settings.block_size)
        sizes = sizes.with_weights_of(drafts)
    elif settings.proposer == "mtp":
        head, draft_block_bytes = head_bytes(
            wanted.folder, sizes, block_size=settings.block_size, latent_cache=settings.latent_cache
        )
        sizes = dataclasses.replace(
            sizes, loaded_bytes=sizes.loaded_bytes + head, weight_bytes=sizes.weight_bytes + head
        )
    question = MemoryQuestion(
        on_cuda=where.on_cuda,
        memory_bytes=where.memory_bytes,
        free_bytes=where.free_bytes,
        cache_bytes=settings.kv_cache_memory_bytes,
        swap_bytes=int(settings.swap_space_gib * GIB),
        block_size=settings.block_size,
        cache_groups=settings.cache_groups,
        draft_block_bytes=draft_block_bytes,
        shortens=settings.max_model_len == AUTO,
        max_num_seqs=wanted.max_num_seqs,
        max_num_batched_tokens=wanted.max_num_batched_tokens,
        num_gpu_blocks_override=settings.num_gpu_blocks_override,
        utilization=settings.gpu_memory_utilization,
        workspace_bytes=workspace_of(settings.attention_backend, sizes.num_attention_kinds) if where.on_cuda else 0,
    )
    return make_plan(dataclasses.replace(sizes, name=wanted.name or sizes.name), question)


def _sizes(
    folder: Path, settings: WorkerSettings, max_model_len: int | Literal["auto"] | None, *, on_cuda: bool
) -> ModelSizes:
    return model_sizes(
        folder,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        max_model_len=max_model_len,
        rounding=Rounding(settings.bits, settings.quantization_group) if settings.bits else None,
        latent_cache=settings.latent_cache,
        packs=() if not settings.fuse else (FLOAT8,) if on_cuda else (torch.int8, FLOAT8),
    )


@dataclass(frozen=True, slots=True)
class _Where:
    """Device of a plan: whether it is a GPU, its total memory, and its free memory (None = unknown).

    On a CPU, `memory_bytes` is what is free.
    """

    on_cuda: bool
    memory_bytes: int
    free_bytes: int | None = None


def _where(settings: WorkerSettings, wanted: Wanted) -> _Where:
    """Device and memory; a memory given as an option need not exist on this machine."""
    if wanted.memory is not None:
        return _Where(settings.device.startswith("cuda"), wanted.memory)
    device = choose_device(settings, CUDA_DEVICES)
    if device is HOST:
        return _Where(False, device.free_bytes())
    return _Where(True, device.total_bytes(), device.free_bytes())
