"""Counts the cache blocks that fit in memory and explains the result. Arithmetic only; callers measure."""

from dataclasses import dataclass

from protos.worker.v1 import worker_pb2
from svc_common.errors import ConfigError
from worker_svc.model.cache.cache_groups import CacheGroups, one_group

MIB = 2**20
GIB = 2**30
DEFAULT_CPU_CACHE_BYTES = 512 * MIB
_ONE_GROUP = one_group([0])


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Measurements and settings, in bytes.

    Device blocks get `total_bytes` * `utilization` - `peak_bytes`, or `cache_bytes` where that is set and on
    CPU. `peak_bytes` counts weights, the peak of the profile step, `workspace_bytes`, which the kernels keep, and
    `staging_bytes`, the buffers of swaps, allocated with the blocks. `block_bytes`: of a block, which holds the layers of one
    of `groups`. `num_state_blocks`: of the states of each sequence. `free_bytes`: free device memory once weights and workspace
    are there; None = not checked. `profiled_tokens`: tokens of the profile step. `draft_weight_bytes`, `draft_block_bytes`: parts
    of `weight_bytes` and `block_bytes` that propose draft tokens.
    """

    block_size: int
    block_bytes: int
    weight_bytes: int
    activation_bytes: int
    swap_bytes: int
    workspace_bytes: int = 0
    staging_bytes: int = 0
    total_bytes: int = 0
    utilization: float = 1.0
    cache_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    free_bytes: int | None = None
    profiled_tokens: int = 0
    groups: CacheGroups = _ONE_GROUP
    draft_weight_bytes: int = 0
    draft_block_bytes: int = 0
    num_state_blocks: int = 0

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks of a sequence of so many tokens, in all cache groups and of its states, as its last step leaves it."""
        return self.num_state_blocks + self.groups.num_blocks(num_tokens, self.block_size)

    def longest(self, num_blocks: int, most: int) -> int:
        """Tokens, at most `most`, of the longest sequence that so many blocks hold; 0 if they hold none."""
        return longest(self.groups, num_blocks - self.num_state_blocks, self.block_size, most)

    @property
    def peak_bytes(self) -> int:
        """Most memory beside the blocks."""
        return self.weight_bytes + self.step_bytes

    @property
    def step_bytes(self) -> int:
        """Peak of the profile step, workspace and buffers of swaps."""
        return self.activation_bytes + self.workspace_bytes + self.staging_bytes


def longest(groups: CacheGroups, num_blocks: int, block_size: int, most: int) -> int:
    """Tokens, at most `most`, of the longest sequence that so many blocks of keys and values hold; 0 if there are none."""
    return groups.longest(num_blocks, block_size, most) if num_blocks > 0 else 0


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Number of device blocks and of host (swap) blocks."""

    num_gpu_blocks: int
    num_cpu_blocks: int


def block_bytes(
    *, dtype_bytes: int, scale_bytes: int = 0, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int
) -> int:
    """Bytes of one block over so many layers, keys and values; `scale_bytes` of them for each token and kv head."""
    return num_layers * 2 * block_size * num_kv_heads * (dtype_bytes * head_dim + scale_bytes)


def count_blocks(budget: MemoryBudget) -> BlockCounts:
    """Block counts, as in vLLM's `determine_num_available_blocks`: rounded down and clamped at 0.

    Both are 0 if a block has no bytes. The override replaces the device count.
    """
    if budget.block_bytes == 0:
        return BlockCounts(0, 0)
    available = budget.cache_bytes
    if available is None:
        available = int(budget.total_bytes * budget.utilization - budget.peak_bytes)
    gpu = max(0, available // budget.block_bytes)
    if budget.num_gpu_blocks_override is not None:
        gpu = budget.num_gpu_blocks_override
    return BlockCounts(gpu, max(0, budget.swap_bytes // budget.block_bytes))


def check_blocks(counts: BlockCounts, budget: MemoryBudget, max_model_len: int) -> None:
    """Raise ConfigError if there is no block, a request of `max_model_len` does not fit, or the device lacks memory.

    The error names the longest request that fits, or the option value that does.
    """
    _check_room(counts, budget)
    needed_blocks = budget.num_blocks(max_model_len)
    if counts.num_gpu_blocks >= needed_blocks:
        return
    longest = budget.longest(counts.num_gpu_blocks, max_model_len)
    more = (
        "raise --num-gpu-blocks-override"
        if budget.num_gpu_blocks_override is not None
        else "raise --kv-cache-memory"
        if budget.cache_bytes is not None
        else "raise --gpu-memory-utilization"
    )
    needed = needed_blocks * budget.block_bytes
    if not longest:
        smallest = (
            f"the {budget.num_state_blocks + 1} blocks of a sequence" if budget.num_state_blocks else "a single block"
        )
        what = f"the memory for the KV cache does not hold {smallest}{_account(budget)}"
        advice = more
    else:
        what = f"the KV cache holds {longest} tokens, fewer than the {max_model_len} that a request may have"
        advice = f"set --max-model-len {longest} (the longest that fits) or less, or {more}"
    raise ConfigError(
        f"{what}: {advice}; {max_model_len} tokens need {size_text(needed)}",
        reason="CACHE_TOO_SMALL",
        metadata={"longest": str(longest), "max_model_len": str(max_model_len), "needed_bytes": str(needed)},
    )


def _account(budget: MemoryBudget) -> str:
    if budget.cache_bytes is not None or budget.num_gpu_blocks_override is not None:
        return ""
    used = size_text(int(budget.total_bytes * budget.utilization))
    return (
        f" ({budget.utilization:g} of {size_text(budget.total_bytes)} are {used}; weights take "
        f"{size_text(budget.weight_bytes)}, the largest step {size_text(budget.step_bytes)})"
    )


def _check_room(counts: BlockCounts, budget: MemoryBudget) -> None:
    if budget.free_bytes is None:
        return
    step_bytes = budget.activation_bytes + budget.staging_bytes
    wanted, room = counts.num_gpu_blocks * budget.block_bytes, max(0, budget.free_bytes - step_bytes)
    if wanted > room:
        raise ConfigError(
            f"the KV cache needs {size_text(wanted)}, but {size_text(budget.free_bytes)} of the device's "
            f"{size_text(budget.total_bytes)} are free, and the largest step takes {size_text(step_bytes)} of them: "
            f"{_smaller(budget, room)}, or stop other processes on the device",
            reason="MEMORY_TOO_SMALL",
            metadata={"free_bytes": str(budget.free_bytes), "wanted_bytes": str(wanted)},
        )


def _smaller(budget: MemoryBudget, room: int) -> str:
    """The option that sets the cache's size, with the largest value that fits."""
    if budget.num_gpu_blocks_override is not None:
        return f"use --num-gpu-blocks-override {room // budget.block_bytes} or less"
    if budget.cache_bytes is not None:
        return f"use --kv-cache-memory {room // MIB}MiB or less"
    most = int(100 * (room + budget.peak_bytes) / budget.total_bytes) / 100
    return f"use --gpu-memory-utilization {most:g} or less"


def check_weights(weight_bytes: int, free_bytes: int, device: str = "cpu") -> None:
    """Raise ConfigError if weights of that size do not fit on `device`."""
    if weight_bytes > free_bytes:
        where = "" if device == "cpu" else f" on {device}"
        raise ConfigError(
            f"the weights take {size_text(weight_bytes)}, but only {size_text(free_bytes)} of memory are free{where}; use a "
            "smaller model or a machine with more memory",
            reason="MEMORY_TOO_SMALL",
            metadata={"free_bytes": str(free_bytes), "weight_bytes": str(weight_bytes)},
        )


def cpu_cache_bytes(wanted: int | None, free_bytes: int, swap_bytes: int) -> int:
    """Bytes for device blocks on CPU: `wanted`, else 512 MiB or what is free beside the swap space.

    Raises ConfigError if `wanted` is more than is free.
    """
    room = max(0, free_bytes - swap_bytes)
    if wanted is None:
        return min(DEFAULT_CPU_CACHE_BYTES, room)
    if wanted > room:
        raise ConfigError(
            f"--kv-cache-memory is {size_text(wanted)}, but {size_text(free_bytes)} are free and --swap-space takes "
            f"{size_text(swap_bytes)} of them; use at most {size_text(room)}",
            reason="MEMORY_TOO_SMALL",
            metadata={"free_bytes": str(free_bytes), "wanted_bytes": str(wanted)},
        )
    return wanted


def profile_response(budget: MemoryBudget, counts: BlockCounts, max_model_len: int) -> worker_pb2.ProfileCacheResponse:
    """The counts with the figures they come from."""
    return worker_pb2.ProfileCacheResponse(
        num_gpu_blocks=counts.num_gpu_blocks,
        num_cpu_blocks=counts.num_cpu_blocks,
        block_size=budget.block_size,
        block_bytes=budget.block_bytes,
        total_bytes=budget.cache_bytes if budget.cache_bytes is not None else budget.total_bytes,
        utilization=1.0 if budget.cache_bytes is not None else budget.utilization,
        weight_bytes=budget.weight_bytes,
        peak_activation_bytes=budget.step_bytes,
        swap_space_bytes=budget.swap_bytes,
        readable=_table(budget, counts, max_model_len),
        max_model_len=max_model_len,
    )


def _table(budget: MemoryBudget, counts: BlockCounts, max_model_len: int) -> str:
    blocks, num_requests = counts.num_gpu_blocks, counts.num_gpu_blocks / budget.num_blocks(max_model_len)
    is_plain = len(budget.groups.windows) == 1 and not budget.num_state_blocks
    tokens = f"{blocks * budget.block_size} tokens, " if is_plain else ""
    cache = counts.num_gpu_blocks * budget.block_bytes
    rows = [
        ("weights", size_text(budget.weight_bytes), _of_drafts(budget.draft_weight_bytes)),
        ("profile step, highest", size_text(budget.activation_bytes), f"{budget.profiled_tokens} tokens"),
        (
            "KV cache on the device",
            size_text(cache),
            f"{counts.num_gpu_blocks} blocks of {budget.block_size} tokens, {size_text(budget.block_bytes)} each",
        ),
        *([("", "", _of_drafts(budget.draft_block_bytes))] if budget.draft_block_bytes else []),
        ("", "", f"{tokens}{num_requests:.1f} requests of {max_model_len}"),
        (
            "swap space on the host",
            size_text(counts.num_cpu_blocks * budget.block_bytes),
            f"{counts.num_cpu_blocks} blocks",
        ),
    ]
    if budget.num_state_blocks:
        held = size_text(budget.num_state_blocks * budget.block_bytes)
        rows.insert(4, ("states", held, f"{budget.num_state_blocks} of the blocks for each request"))
    for name, num_bytes in (
        ("buffers of swaps", budget.staging_bytes),
        ("attention's workspace", budget.workspace_bytes),
    ):
        if num_bytes:
            rows.insert(2, (name, size_text(num_bytes), ""))
    if budget.cache_bytes is None:
        share = f"{budget.utilization:.0%} of it may be used"
        rows.insert(0, ("device memory", size_text(budget.total_bytes), share))
    return "\n".join(f"{name:<24}{size:>12}  {note}".rstrip() for name, size, note in rows)


def _of_drafts(num_bytes: int) -> str:
    return f"{size_text(num_bytes)} of them for drafts" if num_bytes else ""


def size_text(num_bytes: int) -> str:
    """Human-readable size: "512.0 MiB"."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B"
