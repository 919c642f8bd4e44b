"""Memory of the device that a model runs on: what is free, what a piece of work takes at its peak, what the cache may have."""

from collections.abc import Callable

import torch

from worker_svc import container
from worker_svc.model import memory

_CACHE_SHARE = 0.9
"""Of a GPU's memory that is free after weights and the largest step; the rest is for what allocators lose between blocks."""


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """Runs `work`; by how much more memory was in use during it than before, at its highest."""
    if device.type != "cuda":
        return container.peak_bytes(work)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return max(0, peak)


def cache_bytes(device: torch.device, wanted: int | None, swap_bytes: int, activation_bytes: int) -> int:
    """Bytes for device blocks: `wanted`, else what the device has room for. ConfigError when `wanted` is more than is free.

    On CPU the host's swap space comes out of the same memory, and a modest cache will do.
    """
    if device.type != "cuda":
        return memory.cpu_cache_bytes(wanted, container.free_memory_bytes(), swap_bytes)
    free_bytes = max(0, torch.cuda.mem_get_info(device)[0] - activation_bytes)
    return memory.cpu_cache_bytes(int(free_bytes * _CACHE_SHARE) if wanted is None else wanted, free_bytes, 0)
