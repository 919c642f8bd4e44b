"""Policy specifications: the parts of a policy and their settings, as data.

`presets` names the known policies and builds schedulers from specs.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.spec.task_settings import TASK_PHASES, TaskKnobs
from svc_common.errors import ConfigError

V0_PHASES = ("prefill_or_decode", "decode_then_prefill")
PHASES = (*V0_PHASES, "mixed", *TASK_PHASES)
CACHES = ("vllm_2023", "vllm_063", "v1_pool", "quire", "none")
PROGRESS = ("after_result", "at_schedule", "placeholders", "one_under_way")
GROUPINGS = ("request", "sample")
BATCHINGS = ("continuous", "static")
_WITH_WATERMARK = ("vllm_2023", "vllm_063", "quire")
_CHOICES = {
    "phases": PHASES,
    "cache": CACHES,
    "progress": PROGRESS,
    "grouping": GROUPINGS,
    "batching": BATCHINGS,
    "policy": ("fcfs", "priority", "aged"),
    "victims": ("by_order", "least_lost"),
    "restraint": (None, "expected_peak"),
    "preemption_mode": (None, "recompute", "swap"),
    "defects": ("repaired", "recorded"),
}


@dataclass(frozen=True, slots=True)
class PolicySpec(TaskKnobs):
    """Parts by name, then settings under vLLM's names where vLLM has them.

    - `policy`: queue order.
    - `preemption_mode`: None = by the number of sequences.
    - `max_loras`: None = no limit.
    - `watermark_blocks`: None = 1 % of the pool.
    - `sliding_window`: tokens.
    - `async_output`: v0's output handling one step late.
    - `num_spec_tokens`: draft tokens per step.
    - `batch_queue`: maximum number of plans in flight.
    - `fast_path`: fast decode, which makes equal decisions; can be turned off for comparison.
    - `tenant_fairness`: waiting tenants are served in turn, by tokens (`tenant_queue`).

    Settings of the policy `quire`:

    - `patience_s`: waiting time that one priority class is worth (`policy` = aged).
    - `victims`: which group is preempted when blocks run out: "by_order", the last in queue order;
      "least_lost", the one of lowest priority that loses the least work, recomputed or swapped by cost.
    - `makes_way`: groups more than `margin_s` behind the head of the queue may be preempted for it (`policy` =
      aged).
    - `restraint`: prompts wait while running requests are expected to need the blocks, by observed output
      lengths times `caution`.
    - `deadlines`: requests are rejected when their deadline is infeasible and dropped when it has passed.
    - `step_s`, `compute_token_s`, `swap_block_s`: costs in seconds until measured, 0 = unknown.

    `defects`: "recorded" reproduces flaws of the original schedulers. vLLM v0 fails the whole step when host
    blocks run out, loses the host blocks of groups too large to be swapped in, and counts all cached blocks of
    a chunked prompt as computed at its first chunk. Chitu fails the step for tasks that do not fit, and leaves
    tasks evicted under decode_only and starving ranks waiting forever. "repaired": the group is recomputed, its
    blocks are freed, and blocks count once they are filled.
    """

    name: str
    phases: str = "mixed"
    cache: str = "v1_pool"
    progress: str = "at_schedule"
    grouping: str = "sample"
    batching: str = "continuous"
    policy: str = "fcfs"
    preemption_mode: str | None = None
    defects: str = "repaired"
    delay_factor: float = 0.0
    max_loras: int | None = None
    num_lookahead_slots: int = 0
    num_scheduler_steps: int = 1
    watermark_blocks: int | None = None
    sliding_window: int | None = None
    async_output: bool = False
    num_spec_tokens: int = 0
    batch_queue: int = 1
    fast_path: bool = True
    tenant_fairness: bool = False
    patience_s: float = 10.0
    victims: str = "by_order"
    makes_way: bool = False
    margin_s: float = 1.0
    restraint: str | None = None
    caution: float = 1.0
    deadlines: bool = False
    step_s: float = 0.0
    compute_token_s: float = 0.0
    swap_block_s: float = 0.0

    def __post_init__(self) -> None:
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in choices:
                nothing = "; the word for nothing is null" if None in choices else ""
                raise _bad(self, field, f"must be one of {', '.join(as_written(c, str) for c in choices)}{nothing}")
        for field, least in _LEAST.items():
            value = getattr(self, field)
            if value is not None and value < least:
                raise _bad(self, field, f"must be at least {least}")
        for field, wrong in self._contradictions():
            raise _bad(self, field, wrong)

    def with_knobs(self, **knobs: Any) -> "PolicySpec":
        """A copy with other values. `makes_way`, unless given, is turned off when `policy` becomes other than aged.

        ConfigError for values that contradict each other.
        """
        loses_order = knobs.get("policy", "aged") != "aged" and "makes_way" not in knobs
        return replace(self, **({"makes_way": False, **knobs} if loses_order else knobs))

    @property
    def is_v0(self) -> bool:
        """True if steps are planned as in vLLM v0."""
        return self.phases in V0_PHASES

    @property
    def schedules_tasks(self) -> bool:
        """True if steps are planned as in Chitu."""
        return self.phases in TASK_PHASES

    def runs_whole(self, limits: CoreLimits) -> bool:
        """True if prompts are never chunked."""
        if self.schedules_tasks:
            return self.prefill_chunk_size is None
        return self.phases == "prefill_or_decode" or not limits.chunked_prefill

    @property
    def is_multi_step(self) -> bool:
        """True if one plan runs several decode steps."""
        return self.num_scheduler_steps > 1

    @property
    def can_swap(self) -> bool:
        """True if a preempted group's blocks may be swapped to the host."""
        if self.phases == "mixed":
            return self.cache == "quire" and self.victims == "least_lost" and self.preemption_mode != "recompute"
        return self.is_v0 and self.preemption_mode != "recompute" and self.cache != "none"

    def check(self, limits: CoreLimits) -> None:
        """Raise ConfigError if the limits contradict the policy."""
        budget = limits.max_num_batched_tokens
        if self.runs_whole(limits) and budget < limits.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens ({budget}) must not be less than max_model_len ({limits.max_model_len}) without "
                "chunked prefill: the longest prompt would never fit a step (R48)",
                reason="BAD_LIMIT",
            )
        if self.phases == "decode_then_prefill" and limits.prefix_caching and budget % limits.block_size:
            raise ConfigError(
                f"max_num_batched_tokens ({budget}) must be a multiple of block_size ({limits.block_size}) with chunked "
                f"prefill and prefix caching under policy {self.name}: chunks are whole blocks (R87)",
                reason="BAD_LIMIT",
            )
        if self.sliding_window is not None and not self.frees_behind_window(prefix_caching=limits.prefix_caching):
            raise _bad(self, "sliding_window", "does not go with prefix_caching under the block managers of v0")
        if (
            self.defects == "repaired"
            and self.watermark_blocks is not None
            and self.watermark_blocks >= limits.num_gpu_blocks
        ):
            why = f"must be less than num_gpu_blocks ({limits.num_gpu_blocks}), or no prompt is ever admitted (R52)"
            raise _bad(self, "watermark_blocks", why)

    def frees_behind_window(self, *, prefix_caching: bool) -> bool:
        """True if the cache rules support a sliding window: those of v0 do not together with prefix caching."""
        return not (self.is_v0 and prefix_caching)

    def _contradictions(self) -> list[tuple[str, str]]:
        """(field, reason) for every field that contradicts another."""
        v0 = self.is_v0
        rules = (
            *((why is not None, field, why) for field, why in self.wrong_knobs(self.phases)),
            *self._contradictions_of_tasks(),
            *self._contradictions_of_mixed(),
            (v0 and self.cache == "v1_pool", "cache", f"v1_pool does not go with phases={self.phases}"),
            (not v0 and self.cache in ("vllm_2023", "vllm_063"), "cache", "needs phases of v0"),
            (
                v0 == (self.progress != "after_result"),
                "progress",
                "after_result goes with phases of v0, and only with them",
            ),
            (v0 and self.grouping == "sample", "grouping", "phases of v0 schedule a request as one group"),
            (v0 and self.batch_queue > 1, "batch_queue", "v0 needs result k before plan k+1"),
            (
                not v0 and self.preemption_mode == "swap" and not self.can_swap,
                "preemption_mode",
                "mixed phases compute victims again, except with victims=least_lost and cache=quire",
            ),
            (not v0 and self.async_output, "async_output", "is v0's; v1 has progress=placeholders"),
            (not v0 and self.delay_factor > 0, "delay_factor", "is v0's"),
            (not v0 and self.num_lookahead_slots > 0, "num_lookahead_slots", "is v0's"),
            (
                self.cache == "vllm_2023" and self.num_lookahead_slots > 0,
                "num_lookahead_slots",
                "the block manager of 2023 appends one token at a time",
            ),
            (not v0 and self.is_multi_step, "num_scheduler_steps", "is v0's"),
            (v0 and self.num_spec_tokens > 0, "num_spec_tokens", "is v1's"),
            (v0 and self.batching == "static", "batching", "static batches are made of mixed phases"),
            (
                self.sliding_window is not None and self.cache == "none",
                "sliding_window",
                "needs a cache that has blocks",
            ),
            (
                self.watermark_blocks is not None and self.cache not in _WITH_WATERMARK,
                "watermark_blocks",
                f"cache={self.cache} keeps no blocks free; those that do: {', '.join(_WITH_WATERMARK)}",
            ),
        )
        return [(field, why) for wrong, field, why in rules if wrong]

    def _contradictions_of_tasks(self) -> list[tuple[bool, str, str]]:
        """(contradicts, field, reason) for settings of task policies."""
        tasks = self.schedules_tasks
        return [
            (
                tasks != (self.progress == "one_under_way"),
                "progress",
                f"one_under_way goes with phases {', '.join(TASK_PHASES)}, and only with them",
            ),
            (tasks and self.cache != "v1_pool", "cache", "tasks count the blocks of v1_pool"),
            (tasks and self.grouping != "sample", "grouping", "tasks are samples"),
            (tasks and self.batching != "continuous", "batching", "static batches are made of mixed phases"),
            (tasks and self.policy != "fcfs", "policy", "tasks are ordered by scheduler_type"),
            (tasks and self.batch_queue > 1, "batch_queue", "is v1's; tasks have pp_size"),
            (tasks and self.num_spec_tokens > 0, "num_spec_tokens", "is v1's"),
            (tasks and self.max_loras is not None, "max_loras", "tasks keep no account of adapters"),
        ]

    def _contradictions_of_mixed(self) -> list[tuple[bool, str, str]]:
        """(contradicts, field, reason) for parts that only mixed phases have."""
        other = self.phases != "mixed"
        needs_blocks = self.restraint is not None or self.makes_way
        return [
            (
                not other and needs_blocks and self.cache == "none",
                "cache",
                "keeps no blocks to be restrained or to make way for",
            ),
            (other and self.policy == "aged", "policy", f"phases={self.phases} order by arrival or priority"),
            (other and self.victims != "by_order", "victims", "is of mixed phases"),
            (other and self.deadlines, "deadlines", "are of mixed phases"),
            (other and self.restraint is not None, "restraint", "is of mixed phases"),
            (other and self.tenant_fairness, "tenant_fairness", "is of mixed phases"),
            (self.makes_way and (other or self.victims == "by_order"), "makes_way", "goes with victims=least_lost"),
            (self.makes_way and self.policy != "aged", "makes_way", "goes with policy=aged"),
        ]


_LEAST = {
    "delay_factor": 0,
    "max_loras": 1,
    "num_lookahead_slots": 0,
    "num_scheduler_steps": 1,
    "watermark_blocks": 0,
    "sliding_window": 1,
    "num_spec_tokens": 0,
    "batch_queue": 1,
    "patience_s": 0,
    "margin_s": 0,
    "caution": 0,
    "step_s": 0,
    "compute_token_s": 0,
    "swap_block_s": 0,
    "dp_prefix_affinity": 0,
}


def knob_names() -> list[str]:
    """Fields of a spec that an operator may set."""
    return [field.name for field in fields(PolicySpec) if field.name != "name"]


def as_written(value: Any, otherwise: Callable[[Any], str] = repr) -> str:
    """A value as an operator writes it (null, true, false); other values formatted by `otherwise`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return otherwise(value)


def _bad(spec: PolicySpec, field: str, why: str) -> ConfigError:
    return ConfigError(
        f"policy {spec.name}: {field}={as_written(getattr(spec, field))}: {why}",
        reason="BAD_POLICY",
        metadata={"field": field, "policy": spec.name},
    )
