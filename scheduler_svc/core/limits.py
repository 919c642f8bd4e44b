"""Limits of a scheduler: what the worker has and what the operator allows."""

from dataclasses import dataclass, replace

from svc_common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Blocks of a worker group, on its devices (the null block included) and in host memory."""

    num_gpu_blocks: int
    num_cpu_blocks: int = 0


AS_LIMITED = PoolSize(2**62, 2**62)
"""A pool of as many blocks as the limits allow."""


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """Limits of one core, under vLLM's names.

    `num_gpu_blocks` includes the null block where the cache rules reserve one. `max_num_batched_tokens`: token
    budget of a step. `long_prefill_token_threshold`: maximum prompt tokens of one request in a step, 0 = no
    limit. `max_granted_steps`: maximum number of steps that a plan grants (`policies/mixed/decode_grants`), 0 = none.
    `cache_windows`: of each cache group of the worker's model the sliding window in tokens, 0 = the whole sequence; empty
    if there is one, but not if the model has states. `num_state_blocks`: blocks of one sequence's states, 0 = the model has none;
    `checkpoint_tokens`: distance of their checkpoints, a multiple of `block_size`.
    """

    block_size: int
    num_gpu_blocks: int
    max_model_len: int
    num_cpu_blocks: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    prefix_caching: bool = True
    chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_granted_steps: int = 0
    cache_windows: tuple[int, ...] = ()
    num_state_blocks: int = 0
    checkpoint_tokens: int = 0

    def __post_init__(self) -> None:
        is_grouped = len(self.cache_windows) > 1 or self.num_state_blocks
        object.__setattr__(self, "cache_windows", (*self.cache_windows,) or (0,) if is_grouped else ())
        for name in ("block_size", "num_gpu_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}", reason="BAD_LIMIT")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must not be less than max_num_seqs "
                f"({self.max_num_seqs}): every running sequence needs one token per step; raise the first or lower the second",
                reason="BAD_LIMIT",
            )

        if self.num_state_blocks and (self.checkpoint_tokens < 1 or self.checkpoint_tokens % self.block_size):
            raise ConfigError(
                f"checkpoint_tokens ({self.checkpoint_tokens}) must be a multiple of block_size ({self.block_size}), at least "
                "that, for a model with states: cached prefixes are whole blocks",
                reason="BAD_LIMIT",
                metadata={"field": "checkpoint_tokens"},
            )

    def of_pool(self, pool: PoolSize) -> "CoreLimits":
        """The limits for a worker group with such a pool."""
        gpu, cpu = min(self.num_gpu_blocks, pool.num_gpu_blocks), min(self.num_cpu_blocks, pool.num_cpu_blocks)
        return replace(self, num_gpu_blocks=gpu, num_cpu_blocks=cpu)
