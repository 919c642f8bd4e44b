"""Settings of task policies (Chitu), and values derived from them."""

from dataclasses import dataclass, fields

from scheduler_svc.core.limits import CoreLimits

DP_PREFIX_AFFINITY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskKnobs:
    """Settings under the names of Chitu's configuration.

    - `scheduler_type`: scorers, comma-separated; case and blanks are ignored; "" = fcfs.
    - `max_reqs`: tasks of a batch, None = max_num_seqs.
    - `pp_size`: plans in flight; number of slots of `skew`.
    - `dp_size`: ranks.
    - `prefill_chunk_size`: prompt tokens of a batch, None = prompts are not chunked.
    - `dp_prefix_affinity`: a new task goes to the rank with the longest cached prefix of it, provided that rank
      has at most this many tasks more than the least busy one with room; None = round-robin, as in Chitu.

    With `pp_size` above 1 a batch has ceil(max_reqs / pp_size) prefills, or `prefill_num_tasks` if
    `prefill_num_tasks_divided_by_pp` is false; likewise for decodes with `enforce_decode_num_tasks_max` and
    `decode_num_tasks`. `max_prefill_tasks`, `max_decode_tasks`, `num_scheduler_groups` override the derived
    values.
    """

    scheduler_type: str = ""
    max_reqs: int | None = None
    pp_size: int = 1
    dp_size: int = 1
    dp_prefix_affinity: int | None = DP_PREFIX_AFFINITY
    prefill_chunk_size: int | None = None
    prefill_num_tasks_divided_by_pp: bool = True
    prefill_num_tasks: int | None = None
    enforce_decode_num_tasks_max: bool = True
    decode_num_tasks: int | None = None
    max_prefill_tasks: int | None = None
    max_decode_tasks: int | None = None
    num_scheduler_groups: int | None = None

    def num_reqs(self, limits: CoreLimits) -> int:
        """Maximum number of tasks of all batches together."""
        return limits.max_num_seqs if self.max_reqs is None else self.max_reqs

    def num_prefills(self, limits: CoreLimits) -> int:
        """Maximum prefills of a batch."""
        fixed = None if self.prefill_num_tasks_divided_by_pp else self.prefill_num_tasks
        return self._num_tasks(self.max_prefill_tasks, fixed, limits)

    def num_decodes(self, limits: CoreLimits) -> int:
        """Maximum decodes of a batch."""
        fixed = None if self.enforce_decode_num_tasks_max else self.decode_num_tasks
        return self._num_tasks(self.max_decode_tasks, fixed, limits)

    def num_groups(self) -> int:
        """Plans in flight at once."""
        return self.num_scheduler_groups or self.pp_size

    def slot_sizes(self, limits: CoreLimits) -> list[int]:
        """Tasks per slot: `max_reqs` divided evenly, with the remainder on the first slots."""
        num_reqs = self.num_reqs(limits)
        num_slots = self.num_scheduler_groups or min(self.pp_size, num_reqs)
        share, rest = divmod(num_reqs, num_slots)
        return [share + (slot < rest) for slot in range(num_slots)]

    def tasks_per_rank(self, limits: CoreLimits) -> int:
        """Maximum tasks of a rank."""
        return -(-self.num_reqs(limits) // self.dp_size)

    def _num_tasks(self, given: int | None, fixed: int | None, limits: CoreLimits) -> int:
        if given is not None:
            return given
        if self.pp_size == 1:
            return self.num_reqs(limits)
        return fixed if fixed is not None else -(-self.num_reqs(limits) // self.pp_size)


def task_keys() -> list[str]:
    """Names of these settings."""
    return [field.name for field in fields(TaskKnobs)]


COUNTS = (
    "max_reqs",
    "pp_size",
    "dp_size",
    "prefill_chunk_size",
    "prefill_num_tasks",
    "decode_num_tasks",
    "max_prefill_tasks",
    "max_decode_tasks",
    "num_scheduler_groups",
)
"""Settings that must be at least 1."""
