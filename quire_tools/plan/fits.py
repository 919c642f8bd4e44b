"""What fits: the worker's own arithmetic (worker_svc.model.memory) on sizes from a configuration. Pure.

Exact without running anything: weights, blocks, swap space. Estimated: the largest step, which a worker
measures at startup; on CPU the default cache does not depend on it.
"""

from dataclasses import dataclass, replace

from quire_tools.plan.model_sizes import ModelSizes
from svc_common.errors import ConfigError
from worker_svc.device.swaps import staging_bytes
from worker_svc.model import memory
from worker_svc.model.cache.cache_groups import CacheGroups, groups_of, one_group
from worker_svc.model.states.layout import layout_of

_CUDA_CONTEXT_BYTES = 600 * memory.MIB
"""Memory that CUDA and its libraries take before a model is loaded; between 400 and 700 MiB."""
_TYPICAL_TOKENS = (512, 2_048, 8_192, 32_768, 131_072)
# The largest step, measured on Llama shapes: elements of hidden and intermediate states alive at a time per
# token, and bytes per logit with all features of the sampler in use.
_HIDDEN_STATES, _INTERMEDIATE_STATES, _LOGIT_BYTES = 6, 5, 58


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryQuestion:
    """Input of a plan.

    `memory_bytes`: of the GPU, or free on the machine. `free_bytes`: of the GPU, None = nothing else uses
    it. `cache_bytes` None = the worker's default: on a GPU, `utilization` of its memory less weights and
    largest step. `workspace_bytes`: of an attention library. `cache_groups`: whether windowed layers have
    block tables of their own. `draft_block_bytes`: in a block, of what proposes drafts. `shortens`: the context, to what the
    blocks hold.
    """

    on_cuda: bool
    memory_bytes: int
    cache_bytes: int | None
    swap_bytes: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    utilization: float
    num_gpu_blocks_override: int | None = None
    free_bytes: int | None = None
    workspace_bytes: int = 0
    cache_groups: bool = True
    draft_block_bytes: int = 0
    shortens: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One part of the memory. `is_estimate`: a worker measures it at startup."""

    name: str
    num_bytes: int
    is_estimate: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Result of a plan. `parts` add up to the memory; `problems`: why it does not fit; `advice`: what would change that.

    `concurrent`: by length in tokens, the number of such requests that fit at a time. A block holds the layers of one of
    `groups`; the states of a request take `num_state_blocks`.
    """

    sizes: ModelSizes
    question: MemoryQuestion
    parts: tuple[MemoryPart, ...]
    block_bytes: int
    num_gpu_blocks: int
    num_cpu_blocks: int
    concurrent: dict[int, int]
    problems: tuple[str, ...]
    advice: tuple[str, ...]
    groups: CacheGroups
    num_state_blocks: int = 0

    @property
    def token_bytes(self) -> int:
        """KV bytes of a token over all layers."""
        return self.block_bytes * self.sizes.num_layers // (self.groups.num_layers * self.question.block_size)

    @property
    def num_tokens(self) -> int:
        """Tokens that the blocks hold; with several cache groups, or states, of the longest request that they hold alone."""
        if len(self.groups.windows) == 1 and not self.num_state_blocks:
            return self.num_gpu_blocks * self.question.block_size
        return memory.longest(
            self.groups, self.num_gpu_blocks - self.num_state_blocks, self.question.block_size, self.sizes.max_model_len
        )


def activation_bytes(sizes: ModelSizes, question: MemoryQuestion) -> int:
    """Estimated memory of the largest step: its layers, or its logits in the sampler."""
    rows = min(question.max_num_seqs, question.max_num_batched_tokens)
    states = _HIDDEN_STATES * sizes.hidden_size + _INTERMEDIATE_STATES * sizes.intermediate_size
    layers = question.max_num_batched_tokens * states * sizes.dtype_bytes
    return max(layers, rows * sizes.vocab_size * _LOGIT_BYTES)


def make_plan(sizes: ModelSizes, question: MemoryQuestion) -> MemoryPlan:
    """What fits into the memory, and what to change if it does not."""
    if not question.on_cuda:
        packed = sizes.tied_head_bytes + sizes.padding_bytes
        sizes = replace(sizes, weight_bytes=sizes.weight_bytes + packed)
    activation = activation_bytes(sizes, question)
    groups = _groups(sizes, question)
    own_bytes = sizes.block_bytes(groups.num_layers, question.block_size)
    block_bytes = own_bytes + question.draft_block_bytes
    num_state_blocks = layout_of(sizes.states, groups.num_layers, own_bytes // groups.num_layers).num_blocks
    problems: list[str] = []
    budget = memory.MemoryBudget(
        block_size=question.block_size,
        block_bytes=block_bytes,
        weight_bytes=sizes.weight_bytes,
        activation_bytes=activation,
        workspace_bytes=question.workspace_bytes,
        staging_bytes=staging_bytes(block_bytes, question.swap_bytes) if question.on_cuda else 0,
        swap_bytes=question.swap_bytes,
        total_bytes=question.memory_bytes,
        utilization=question.utilization,
        cache_bytes=_cache_bytes(sizes, question, problems),
        num_gpu_blocks_override=question.num_gpu_blocks_override,
        free_bytes=_free_bytes(sizes, question),
        groups=groups,
        num_state_blocks=num_state_blocks,
    )
    counts = memory.count_blocks(budget)
    longest = budget.longest(counts.num_gpu_blocks, sizes.max_model_len)
    if question.shortens and longest:
        sizes = replace(sizes, max_model_len=longest)
    try:
        memory.check_blocks(counts, budget, sizes.max_model_len)
    except ConfigError as error:
        problems.append(error.message)
    made = MemoryPlan(
        sizes=sizes,
        question=question,
        parts=_parts(budget, question, counts.num_gpu_blocks * block_bytes),
        block_bytes=block_bytes,
        num_gpu_blocks=counts.num_gpu_blocks,
        num_cpu_blocks=counts.num_cpu_blocks,
        concurrent=_concurrent(sizes.max_model_len, budget, counts.num_gpu_blocks, question.max_num_seqs),
        problems=tuple(problems),
        advice=(),
        groups=groups,
        num_state_blocks=num_state_blocks,
    )
    return replace(made, advice=_advice(sizes, question, made.num_tokens, fits=not problems))


def _groups(sizes: ModelSizes, question: MemoryQuestion) -> CacheGroups:
    if not (question.cache_groups and sizes.windows):
        return one_group(range(sizes.num_layers))
    return groups_of(dict(enumerate(sizes.windows)), question.block_size, sizes.max_model_len)


def _cache_bytes(sizes: ModelSizes, question: MemoryQuestion, problems: list[str]) -> int | None:
    """Bytes for blocks, as the worker computes them after loading the weights; adds a problem where the worker would fail."""
    try:
        # A GPU reads the weights that it keeps as they are stored when it packs them.
        memory.check_weights(sizes.weight_bytes if question.on_cuda else sizes.loaded_bytes, question.memory_bytes)
        if question.on_cuda:
            return question.cache_bytes
        free = question.memory_bytes - sizes.weight_bytes
        return memory.cpu_cache_bytes(question.cache_bytes, free, question.swap_bytes)
    except ConfigError as error:
        problems.append(error.message)
        return 0


def _free_bytes(sizes: ModelSizes, question: MemoryQuestion) -> int | None:
    """Free GPU memory once CUDA, the weights and the workspace are there; None for a CPU."""
    if not question.on_cuda:
        return None
    free = question.memory_bytes - _CUDA_CONTEXT_BYTES if question.free_bytes is None else question.free_bytes
    return max(0, free - sizes.weight_bytes - question.workspace_bytes)


def _parts(budget: memory.MemoryBudget, question: MemoryQuestion, cache: int) -> tuple[MemoryPart, ...]:
    parts = [
        MemoryPart("weights", budget.weight_bytes),
        MemoryPart("largest step", budget.activation_bytes, is_estimate=True),
    ]
    if question.on_cuda:
        parts.append(MemoryPart("attention's workspace", budget.workspace_bytes))
        parts.append(MemoryPart("buffers of swaps", budget.staging_bytes))
        parts.append(MemoryPart("CUDA itself", _CUDA_CONTEXT_BYTES, is_estimate=True))
    parts.append(MemoryPart("KV cache", cache))
    if not question.on_cuda:
        parts.append(MemoryPart("swap space", question.swap_bytes))
    left = question.memory_bytes - sum(part.num_bytes for part in parts)
    return (*parts, MemoryPart("free", max(0, left)))


def _concurrent(max_model_len: int, budget: memory.MemoryBudget, num_blocks: int, most: int) -> dict[int, int]:
    lengths = sorted({*(length for length in _TYPICAL_TOKENS if length < max_model_len), max_model_len})
    return {length: min(most, num_blocks // budget.num_blocks(length)) for length in lengths}


def _advice(sizes: ModelSizes, question: MemoryQuestion, tokens: int, *, fits: bool) -> tuple[str, ...]:
    """What would make room, cheapest first."""
    advice = []
    if not fits and 0 < tokens < sizes.max_model_len:
        advice.append(f"--max-model-len {tokens}: the longest request that these blocks hold")
    if not fits and sizes.cache_dtype_bytes > 2:
        advice.append("--kv-cache-dtype bfloat16: twice as many tokens in the same memory")
    if not fits and sizes.cache_dtype_bytes > 1:
        advice.append("--kv-cache-dtype int8 or fp8: nearly twice as many tokens as in bfloat16")
    if not fits and sizes.dtype_bytes > 2:
        advice.append(f"--dtype bfloat16: the weights take {memory.size_text(sizes.weight_bytes // 2)} less")
    if not fits and question.on_cuda:
        advice.append("--max-num-batched-tokens and --max-num-seqs: smaller ones make the largest step smaller")
    most = _most_cache(sizes, question)
    if not question.on_cuda and question.cache_bytes is None and most > memory.DEFAULT_CPU_CACHE_BYTES:
        advice.append(f"--kv-cache-memory: {memory.size_text(most)} would fit; on CPU the default is modest")
    return tuple(advice)


def _most_cache(sizes: ModelSizes, question: MemoryQuestion) -> int:
    return question.memory_bytes - sizes.weight_bytes - question.swap_bytes - activation_bytes(sizes, question)
