"""The cache rules that a policy names, for the model and the memory of one worker group."""

from typing import Any

from block_manager.cache_rules import CacheRules
from block_manager.compat.vllm_063 import Vllm063Rules
from block_manager.compat.vllm_2023 import Vllm2023Rules
from block_manager.hashing import HashChain, HashRename
from block_manager.rules.grouped_rules import GroupedQuireRules, GroupedRules
from block_manager.rules.no_blocks import NoBlocks
from block_manager.rules.per_rank import RankRules
from block_manager.rules.quire_rules import QuireRules
from block_manager.rules.v1_rules import V1PoolRules
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.spec.policy_spec import PolicySpec

Chains = dict[str, HashChain]


def cache_of(spec: PolicySpec, limits: CoreLimits, rename: HashRename | None, chains: Chains) -> CacheRules:
    """Cache rules over an empty memory. `rename`: as in `presets.build`; `chains`: shared by all worker groups."""
    sizes = _sizes(limits, rename, chains)
    if spec.cache == "v1_pool":
        return v1_rules(spec, limits, rename, chains)
    if spec.cache == "none":
        return NoBlocks(max_model_len=limits.max_model_len)
    sizes["watermark_blocks"] = spec.watermark_blocks
    if spec.cache == "quire":
        if limits.cache_windows:
            return GroupedQuireRules.make(**_of_groups(spec, limits), **sizes)
        return QuireRules.make(**sizes, window=spec.sliding_window)
    sizes["sliding_window"], as_recorded = spec.sliding_window, spec.defects == "recorded"
    if spec.cache == "vllm_2023":
        return Vllm2023Rules.make(**sizes, keeps_stale_keys=as_recorded)
    return Vllm063Rules.make(**sizes, counts_whole_prompts=as_recorded, exact_window=not as_recorded)


def v1_rules(spec: PolicySpec, limits: CoreLimits, rename: HashRename | None, chains: Chains) -> RankRules:
    """V1's rules over an empty memory, of one cache group, of several, or with states."""
    sizes = _sizes(limits, rename, chains)
    if limits.cache_windows:
        return GroupedRules.make(**_of_groups(spec, limits), **sizes)
    return V1PoolRules.make(**sizes, window=spec.sliding_window)


def moves_sequences(spec: PolicySpec, limits: CoreLimits) -> bool:
    """True if a sequence can move with its blocks: these hold all of it, and full ones do not change.

    States after draft tokens are elsewhere until it is known which of these are right (docs/decisions/0047). Rules that do not
    know cache groups write again into blocks that have left a window.
    """
    has_whole_tables = spec.sliding_window is None or spec.has("cache groups")
    return has_whole_tables and not (limits.num_state_blocks and spec.num_spec_tokens)


def _of_groups(spec: PolicySpec, limits: CoreLimits) -> dict[str, Any]:
    return {
        "windows": [window or None for window in limits.cache_windows],
        "num_ahead_tokens": _num_ahead_tokens(spec, limits),
        "num_state_blocks": limits.num_state_blocks,
        "checkpoint_tokens": limits.checkpoint_tokens,
        "keeps_unknown": spec.has("placeholders") and not spec.num_spec_tokens,
    }


def _num_ahead_tokens(spec: PolicySpec, limits: CoreLimits) -> int:
    """Tokens of a sequence that are not known to be computed when blocks behind windows were freed last, and those of the
    step that is planned: of all steps in flight, and of the one that returned last, in which blocks are freed up to its
    first token. Of the limits at start: a service never raises the token budget above them.
    """
    num_steps = 1 + spec.async_output + spec.batch_queue
    return num_steps * (limits.max_num_batched_tokens + spec.num_lookahead_slots)


def _sizes(limits: CoreLimits, rename: HashRename | None, chains: Chains) -> dict[str, Any]:
    return {
        "block_size": limits.block_size,
        "num_gpu_blocks": limits.num_gpu_blocks,
        "num_cpu_blocks": limits.num_cpu_blocks,
        "max_model_len": limits.max_model_len,
        "prefix_caching": limits.prefix_caching,
        "rename": rename,
        "chains": chains,
    }
