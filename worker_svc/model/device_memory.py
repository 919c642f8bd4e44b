"""The memory of the device that a model runs on, put into the budget that blocks are counted from."""

from dataclasses import replace

from worker_svc.device.devices import HOST, Device
from worker_svc.model import memory


def measured(device: Device, budget: memory.MemoryBudget) -> memory.MemoryBudget:
    """`budget` with what `device` has. ConfigError when a cache of `budget.cache_bytes` does not fit on the host.

    On a GPU that is R9's total, and what is free to check the blocks against. On the host, where others use the memory too, swap
    space comes out of the same memory, and a modest cache will do.
    """
    if device is HOST:
        cache_bytes = memory.cpu_cache_bytes(budget.cache_bytes, device.free_bytes(), budget.swap_bytes)
        return replace(budget, cache_bytes=cache_bytes)
    return replace(budget, total_bytes=device.total_bytes(), free_bytes=device.free_bytes())
