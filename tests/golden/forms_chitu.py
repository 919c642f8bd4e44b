"""Form of the family chitu."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tests.golden.forms import Count, File, Form, Positive, check, refused


def _as_list(value: Any) -> Any:
    """One number stands for itself again and again."""
    return [value] if isinstance(value, int) else value


class PpConfig(Form):
    """Two flags and the fixed numbers that stand where they do not hold."""

    prefill_num_tasks_divided_by_pp: bool
    prefill_num_tasks: Positive
    enforce_decode_num_tasks_max: bool
    decode_num_tasks: Positive


class SchedulerForm(Form):
    """`type`: comma-separated scorers; what words there are is the scheduler's business."""

    type: str
    pp_config: PpConfig | None = None


class Infer(Form):
    """Sizes of what runs the batches."""

    max_reqs: Positive
    pp_size: Positive
    dp_size: Positive
    cache_type: Literal["paged", "skew"]
    prefill_chunk_size: Positive | None
    num_blocks: Positive
    block_size: Positive


class Limits(Form):
    """Instead of what is derived."""

    prefill_num_tasks: Positive | None = None
    decode_num_tasks: Positive | None = None
    num_scheduler_groups: Positive | None = None


class Clock(Form):
    """Nanoseconds."""

    start_ns: int
    step_ns: Count


class Config(Form):
    """`lag`: of every batch, or used in turn. `stop_step`: the recording ends there though tasks are left."""

    scheduler: SchedulerForm
    infer: Infer
    limits: Limits | None = None
    lag: Annotated[list[Count], Field(min_length=1), BeforeValidator(_as_list)]
    clock: Clock
    handoff: bool = False
    stop_step: Count | None = None


class Event(Form):
    """Warm-up goes on or off."""

    step: Count
    warmup: bool


class Task(Form):
    """`eos_at`: which generated token is EOS; `start_time`: nanoseconds, like `arrv_ts`."""

    id: str
    arrival_step: Count
    arrv_ts: int
    prompt_len: Positive
    max_new_tokens: Positive
    priority: int
    eos_at: Positive | None = None
    start_time: int | None = None
    prefilled: bool = False


class FileChitu(File):
    """Of chitu."""

    config: Config
    events: list[Event] = Field(default=[])
    tasks: list[Task]
    trace: list[dict[str, Any]] | None = None


def check_chitu(data: dict[str, Any]) -> None:
    """ScenarioError for what is not of the form."""
    check(FileChitu, data)
    seen: set[str] = set()
    for i, task in enumerate(data["tasks"]):
        if task["id"] in seen:
            raise refused(f"tasks[{i}].id", "another task has this id", task["id"])
        seen.add(task["id"])
