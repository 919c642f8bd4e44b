"""Adds the device's memory to the budget that blocks are counted from."""

from dataclasses import replace

from worker_svc.device.devices import HOST, Device
from worker_svc.model import memory


def measured(device: Device, budget: memory.MemoryBudget) -> memory.MemoryBudget:
    """`budget` with the memory of `device`.

    Raises ConfigError if `budget.cache_bytes` does not fit on the host.

    On a GPU this sets the total memory, and the free memory to check the blocks against. On the host, other
    processes use the memory too and swap space comes out of it, so the default cache is small.
    """
    if device is HOST:
        cache_bytes = memory.cpu_cache_bytes(budget.cache_bytes, device.free_bytes(), budget.swap_bytes)
        return replace(budget, cache_bytes=cache_bytes)
    return replace(budget, total_bytes=device.total_bytes(), free_bytes=device.free_bytes())
