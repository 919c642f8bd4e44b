"""Policy specifications: the parts of a policy and their settings, as data.

`presets` names the known policies and builds schedulers from specs.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.policies.chitu.scorers import SCORERS, unknown_words
from scheduler_svc.core.spec import abilities
from scheduler_svc.core.spec.task_settings import COUNTS, TaskKnobs
from svc_common.errors import ConfigError

_LEAST = {
    **dict.fromkeys(COUNTS, 1),
    **dict.fromkeys(("max_loras", "num_scheduler_steps", "sliding_window", "batch_queue"), 1),
    **dict.fromkeys(("delay_factor", "num_lookahead_slots", "watermark_blocks", "num_spec_tokens"), 0),
    **dict.fromkeys(("patience_s", "margin_s", "caution", "chunk_s", "step_s", "compute_token_s", "swap_block_s"), 0),
    "dp_prefix_affinity": 0,
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
    - `tenant_fairness`: waiting tenants are served in turn, by tokens (`fair_queue`).
    - `placement`: on which of several worker groups a waiting group starts (`parts/placement`): "prefix_affinity",
      "least_work" or "round_robin".

    Settings of the policy `quire`:

    - `patience_s`: waiting time that one priority class is worth (`policy` = aged).
    - `victims`: which group is preempted when blocks run out: "by_order", the last in queue order;
      "least_lost", the one of lowest priority that loses the least work, recomputed or swapped by cost.
    - `makes_way`: groups more than `margin_s` behind the head of the queue may be preempted for it (`policy` =
      aged).
    - `restraint`: prompts wait while running requests are expected to need the blocks, by observed output
      lengths times `caution`.
    - `chunk_s`: while requests decode, the seconds that the prompt tokens of a step may take, 0 = no limit.
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
    placement: str = "prefix_affinity"
    patience_s: float = 10.0
    victims: str = "by_order"
    makes_way: bool = False
    margin_s: float = 1.0
    restraint: str | None = None
    caution: float = 1.0
    chunk_s: float = 0.0
    deadlines: bool = False
    step_s: float = 0.0
    compute_token_s: float = 0.0
    swap_block_s: float = 0.0

    def __post_init__(self) -> None:
        for field in abilities.PARTS:
            words = abilities.choices(field)
            if words and getattr(self, field) not in words:
                nothing = "; the word for nothing is null" if None in words else ""
                raise _bad(self, field, f"must be one of {', '.join(as_written(w, str) for w in words)}{nothing}")
        for field, least in _LEAST.items():
            value = getattr(self, field)
            if value is not None and value < least:
                raise _bad(self, field, f"must be at least {least}")
        if unknown := unknown_words(self.scheduler_type):
            known = ", ".join(sorted(word for word in SCORERS if word))
            raise _bad(self, "scheduler_type", f"has no scorer {unknown[0]!r}; there are: {known}")
        for field, why in abilities.contradictions(self):
            raise _bad(self, field, why)

    def with_knobs(self, **knobs: Any) -> "PolicySpec":
        """A copy with other values. A new `policy` without start times turns `makes_way` off, unless that is given.

        ConfigError for values that contradict each other.
        """
        keeps_order = "policy" not in knobs or "start times" in abilities.offers_of("policy", knobs["policy"])
        return replace(self, **(knobs if keeps_order else {"makes_way": False, **knobs}))

    def has(self, *needed: str) -> bool:
        """True if the parts offer all these abilities (`abilities`)."""
        return abilities.offered(self).issuperset(needed)

    @property
    def is_v0(self) -> bool:
        """True if steps are planned as in vLLM v0."""
        return self.has("steps of v0")

    @property
    def schedules_tasks(self) -> bool:
        """True if steps are planned as in Chitu."""
        return self.has("tasks")

    @property
    def is_multi_step(self) -> bool:
        """True if one plan runs several decode steps."""
        return self.num_scheduler_steps > 1

    @property
    def can_swap(self) -> bool:
        """True if a preempted group's blocks may be swapped to the host."""
        return self.has("swap", "host blocks", "preemption by swap")

    def runs_whole(self, *, chunked_prefill: bool) -> bool:
        """True if prompts are never chunked. `chunked_prefill`: the limit of that name."""
        if self.schedules_tasks:
            return self.prefill_chunk_size is None
        return self.has("whole prompts") or not chunked_prefill

    def check(self, limits: CoreLimits) -> None:
        """Raise ConfigError if the limits contradict the policy."""
        budget, size = limits.max_num_batched_tokens, limits.block_size
        if self.runs_whole(chunked_prefill=limits.chunked_prefill) and budget < limits.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens ({budget}) must not be less than max_model_len ({limits.max_model_len}) without "
                "chunked prefill: the longest prompt would never fit a step; raise the first or lower the second",
                reason="BAD_LIMIT",
            )
        if self.has("chunks of whole blocks") and limits.prefix_caching and budget % size:
            raise ConfigError(
                f"max_num_batched_tokens ({budget}) must be a multiple of block_size ({size}) with chunked prefill and "
                f"prefix caching under policy {self.name}: chunks are whole blocks; use {-(-budget // size) * size}",
                reason="BAD_LIMIT",
            )
        if self.sliding_window is not None and not self.frees_behind_window(prefix_caching=limits.prefix_caching):
            why = "the block managers of v0 free no blocks outside a window with prefix_caching; turn that off"
            raise _bad(self, "sliding_window", why)
        self._check_states(limits)
        if limits.cache_windows and not self.has("cache groups"):
            raise _bad(
                self,
                "cache",
                f"keeps one block table for all layers, and the layers of the model form {len(limits.cache_windows)} cache "
                "groups; start the worker with --no-cache-groups, or use a policy with cache=v1_pool or quire",
            )
        most = limits.num_gpu_blocks - 1
        if self.defects == "repaired" and self.watermark_blocks is not None and self.watermark_blocks > most:
            why = f"must be less than num_gpu_blocks ({most + 1}), or no prompt is ever admitted; use at most {most}"
            raise _bad(self, "watermark_blocks", why)

    def _check_states(self, limits: CoreLimits) -> None:
        """Raise ConfigError where the policy cannot serve a model with states."""
        if not limits.num_state_blocks:
            return
        what = "the model has layers with states, which take in each token once"
        if not self.has("cache groups"):
            raise _bad(self, "cache", f"keeps no states of sequences, and {what}; use cache=v1_pool or quire")
        if self.is_v0:
            raise _bad(
                self, "phases", f"schedules tokens that are cached already, and {what}; use policy quire or vllm-v1"
            )

    def frees_behind_window(self, *, prefix_caching: bool) -> bool:
        """True if the cache rules support a sliding window: those of v0 do not together with prefix caching."""
        return not (self.is_v0 and prefix_caching)


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
