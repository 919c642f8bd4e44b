"""The worker's options from one form to another: command line -> settings, and `quire up` -> `quire serve worker`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cli.options.settings import switches_for
from quire.sizes import GIB, parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What the command line said about the worker; None and empty = not given."""

    served_model_name: str = ""
    dtype: str = "auto"
    quantization: str = "none"
    max_model_len: int | None = None
    block_size: int | None = None
    gpu_memory_utilization: float | None = None
    swap_space: str | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_memory: str | None = None
    backend: str = "auto"
    device: str = "auto"
    num_threads: int | None = None
    fuse: bool | None = None
    invariant: bool | None = None
    max_adapters: int | None = None
    max_adapter_rank: int | None = None
    mask_budget_ms: float | None = None

    def setting_values(self, model: Path) -> dict[str, Any]:
        """Keyword arguments of WorkerSettings, without those not given. ConfigError for a size that is none."""
        swap = parse_size(self.swap_space, "--swap-space", plain_unit=GIB) / GIB if self.swap_space else None
        cache = parse_size(self.kv_cache_memory, "--kv-cache-memory") if self.kv_cache_memory else None
        values = {
            "model": model,
            "served_model_name": self.served_model_name,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "max_model_len": self.max_model_len,
            "block_size": self.block_size,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "swap_space_gib": swap,
            "num_gpu_blocks_override": self.num_gpu_blocks_override,
            "kv_cache_dtype": self.kv_cache_dtype,
            "kv_cache_memory_bytes": cache,
            "backend": self.backend,
            "device": self.device,
            "num_threads": self.num_threads,
            "fuse": self.fuse,
            "invariant": self.invariant,
            "max_adapters": self.max_adapters,
            "max_adapter_rank": self.max_adapter_rank,
            "mask_budget_ms": self.mask_budget_ms,
        }
        return {name: value for name, value in values.items() if value is not None}

    def arguments(self) -> list[str]:
        """The same as arguments of `quire serve worker`."""
        named = {
            "--served-model-name": self.served_model_name or None,
            "--dtype": self.dtype,
            "--quantization": self.quantization,
            "--max-model-len": self.max_model_len,
            "--block-size": self.block_size,
            "--gpu-memory-utilization": self.gpu_memory_utilization,
            "--swap-space": self.swap_space,
            "--num-gpu-blocks-override": self.num_gpu_blocks_override,
            "--kv-cache-dtype": self.kv_cache_dtype,
            "--kv-cache-memory": self.kv_cache_memory,
            "--backend": self.backend,
            "--device": self.device,
            "--num-threads": self.num_threads,
            "--max-adapters": self.max_adapters,
            "--max-adapter-rank": self.max_adapter_rank,
            "--mask-budget-ms": self.mask_budget_ms,
        }
        given = [part for name, value in named.items() if value is not None for part in (name, str(value))]
        return given + switches_for({"fuse": self.fuse, "invariant": self.invariant})
