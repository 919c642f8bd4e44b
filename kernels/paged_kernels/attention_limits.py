"""What attention of a backend takes, and its workspace. A worker refuses the rest when it starts, before it serves."""

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass

import torch

from paged_kernels.backend import AttentionRule, CacheShape

Capability = tuple[int, int]
"""Compute capability of a CUDA device."""


@dataclass(frozen=True, slots=True)
class AttentionLimits:
    """What a backend takes. Keys and values have the dtype of queries.

    `heads`: head sizes, as text for errors and as values; `block_sizes`: the same. `capabilities`: of NVIDIA GPUs,
    the lowest and the highest.
    """

    head_dims: Container[int]
    heads: str
    block_sizes: Container[int]
    blocks: str
    dtypes: Collection[torch.dtype]
    capabilities: tuple[Capability, Capability]
    softcap: bool = True
    window: bool = True
    sinks: bool = False
    chunks: bool = False

    def problem(
        self, shape: CacheShape, dtype: torch.dtype, cache_dtype: torch.dtype, rules: Iterable[AttentionRule]
    ) -> str:
        """What of a model is not taken: "takes head sizes of ..., not 80"; empty if all is."""
        known = sorted(map(_name, self.dtypes))
        if shape.head_dim not in self.head_dims:
            return f"takes head sizes of {self.heads}, not {shape.head_dim}"
        if shape.block_size not in self.block_sizes:
            return f"takes {self.blocks} tokens per block (--block-size), not {shape.block_size}"
        if dtype not in self.dtypes:
            return f"takes --dtype {' or '.join(known)}, not {_name(dtype)}"
        if cache_dtype != dtype:
            return f"takes a cache of the compute type {_name(dtype)}, not --kv-cache-dtype {_name(cache_dtype)}"
        return next((found for rule in rules if (found := self._rule_problem(rule))), "")

    def _rule_problem(self, rule: AttentionRule) -> str:
        if rule.softcap is not None and not self.softcap:
            return f"takes no soft cap of scores, and the model's is {rule.softcap:g}"
        if rule.sinks is not None and not self.sinks:
            return "takes no attention sinks, which the model has"
        if rule.sliding_window is not None and not self.window:
            return f"takes no sliding window, and the model's is {rule.sliding_window}"
        if rule.chunk is not None and not self.chunks:
            return f"takes no chunked attention, and the model's chunks have {rule.chunk} tokens"
        return ""

    def device_problem(self, capability: Capability, *, is_nvidia: bool = True) -> str:
        """Why a device is not taken; empty if it is."""
        if not is_nvidia:
            return "needs an NVIDIA GPU, and this one is AMD's"
        lowest, highest = self.capabilities
        if lowest <= capability <= highest:
            return ""
        wanted = f"{_dotted(lowest)} to {_dotted(highest)}" if highest[0] < _ANY else f"{_dotted(lowest)} or more"
        return f"needs a GPU of compute capability {wanted}, and this one has {_dotted(capability)}"


_ANY = 99
ANY_LATER: Capability = (_ANY, 0)
ANY_BLOCK_SIZE = range(1, 1025)
"""Those of WorkerSettings."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Device memory that a library holds for good: `shared_bytes`, and `kind_bytes` for each kind of layer."""

    shared_bytes: int
    kind_bytes: int

    def num_bytes(self, num_kinds: int) -> int:
        """For a model with `num_kinds` different AttentionRules in its layers."""
        return self.shared_bytes + num_kinds * self.kind_bytes


WORKSPACES: Mapping[str, Workspace] = {
    # For the parts of split sequences, as in SGLang: plan() raises if it is too small, so it is larger than the 128 MiB
    # advised. A wrapper allocates the rest itself.
    "flashinfer": Workspace(384 * 2**20, 8 * 2**20 + 4 * 32768),
}
"""By name of the attention backend; the others of this repository have none."""


def workspace_of(name: str, num_kinds: int) -> int:
    """Bytes that the attention backend `name` holds; 0 for those of other packages, which are measured when they run."""
    return WORKSPACES[name].num_bytes(num_kinds) if name in WORKSPACES else 0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dotted(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"
