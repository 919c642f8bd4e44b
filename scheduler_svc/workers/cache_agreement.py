"""Agreement of all workers of a scheduler on model and block size, and on the number of blocks that each allocates."""

import asyncio
from dataclasses import dataclass

from protos.common.v1 import common_pb2
from svc_common.errors import FailedPrecondition


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Numbers of blocks allocated at a worker, or that fit there. Device blocks include the null block."""

    num_gpu_blocks: int
    num_cpu_blocks: int
    block_size: int


class CacheAgreement:
    """What each worker reported: they must have the same model and block size.

    `num_equal`: of so many workers, which are ranks, each allocates the least of each count, after all have profiled
    (worker.proto); None: each allocates what fits. A restarted worker reports again. While a worker is away its last report
    is kept: the others allocated by it, and its requests continue elsewhere.
    """

    def __init__(self, num_equal: int | None) -> None:
        self._num_equal = num_equal
        self._said: dict[str, tuple[common_pb2.ModelLimits, CacheCounts]] = {}
        self._is_complete = asyncio.Event()

    async def reach(self, address: str, limits: common_pb2.ModelLimits, fit: CacheCounts) -> CacheCounts:
        """The counts to allocate at a worker that has room for `fit`; of ranks, waits until each has reported.

        Raises FailedPrecondition if its model or blocks differ from those of workers that reported before.
        """
        self._said.pop(address, None)
        for other, (known, _) in self._said.items():
            _check_same(address, limits, other, known)
        self._said[address] = (limits, fit)
        if self._num_equal is None:
            return fit
        if len(self._said) == self._num_equal:
            self._is_complete.set()
        await self._is_complete.wait()
        return least([counts for _, counts in self._said.values()])


def most(counts: list[CacheCounts]) -> CacheCounts:
    """The most of each count, for workers with equal block sizes."""
    return CacheCounts(
        num_gpu_blocks=max(c.num_gpu_blocks for c in counts),
        num_cpu_blocks=max(c.num_cpu_blocks for c in counts),
        block_size=counts[0].block_size,
    )


def least(counts: list[CacheCounts]) -> CacheCounts:
    """The least of each count, for workers with equal block sizes."""
    return CacheCounts(
        num_gpu_blocks=min(c.num_gpu_blocks for c in counts),
        num_cpu_blocks=min(c.num_cpu_blocks for c in counts),
        block_size=counts[0].block_size,
    )


def _check_same(address: str, limits: common_pb2.ModelLimits, other: str, known: common_pb2.ModelLimits) -> None:
    for name, ours, theirs in (
        ("model", _model(limits), _model(known)),
        ("block size", str(limits.block_size), str(known.block_size)),
        ("longest sequence", str(limits.max_model_len), str(known.max_model_len)),
        ("cache groups", str([*limits.cache_windows]), str([*known.cache_windows])),
        ("states' blocks", str(limits.num_state_blocks), str(known.num_state_blocks)),
        ("distance of checkpoints", str(limits.checkpoint_tokens), str(known.checkpoint_tokens)),
        ("model bundle", limits.bundle_digest[:12], known.bundle_digest[:12]),
    ):
        if ours != theirs:
            raise FailedPrecondition(
                f"its {name} is {ours}, and that of the worker at {other} is {theirs}; start all workers of a scheduler with the "
                "same model and options",
                reason="WORKERS_DIFFER",
                metadata={"worker": address, "other": other, "field": name},
            )


def _model(limits: common_pb2.ModelLimits) -> str:
    return f"{limits.model} ({limits.model_digest[:12]}, {limits.dtype})"
