"""Forms of the families v0, v0bm1 and v1."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tests.golden.forms import Count, File, Form, Positive, ScenarioError, Tokens, check, refused

Policy = Literal["fcfs", "priority"]


class AbortV0(Form):
    """Of v0 and v0bm1: there is one moment in a step."""

    step: Count
    id: str
    when: Literal["before_schedule"] = "before_schedule"


class AbortV1(Form):
    """Of v1: before the step is planned, or while a batch is executing."""

    step: Count
    id: str
    when: Literal["before_schedule", "before_update"] = "before_schedule"


class RequestV0(Form):
    """One list of outputs per sample; `beam_parents`: for each decode step the parent of each sample."""

    id: str
    arrival_step: Count
    arrival_time: float
    prompt: Tokens
    priority: int
    n: Positive
    outputs: list[Tokens]
    lora: Count | None = None
    beam_parents: list[list[Count]] | None = None
    max_tokens: Positive | None = None


class RequestV1(Form):
    """`draft_ok`: which guesses are right, a pattern of seven."""

    id: str
    arrival_step: Count
    arrival_time: float
    prompt: Tokens
    priority: int
    outputs: Tokens
    max_tokens: Positive
    draft_ok: list[bool] = Field(default=[True] * 7, min_length=7)


class Config(Form):
    """Common to the schedulers of vLLM."""

    block_size: Positive
    num_gpu_blocks: Positive
    max_num_seqs: Positive
    max_num_batched_tokens: Positive
    max_model_len: Positive
    policy: Policy
    chunked_prefill: bool
    prefix_caching: bool


class ConfigV0(Config):
    """Of v0 and v0bm1."""

    num_cpu_blocks: Count
    preemption_mode: Literal["swap", "recompute"] | None
    delay_factor: Annotated[float, Field(ge=0)]
    num_lookahead_slots: Count = 0
    max_loras: Positive | None = None
    watermark_blocks: Count | None = None
    sliding_window: Positive | None = None
    async_output: bool = False


class ConfigV1(Config):
    """Of v1."""

    is_async: bool = Field(alias="async")
    long_prefill_token_threshold: Count
    num_spec_tokens: Count = 0
    batch_queue: Positive = 1


class FileV0(File):
    """`clock`: now() of each step."""

    config: ConfigV0
    requests: list[RequestV0]
    aborts: list[AbortV0] = Field(default=[])
    trace: list[dict[str, Any]] | None = None
    clock: list[float] | None = None


class FileV1(File):
    """Of v1."""

    config: ConfigV1
    requests: list[RequestV1]
    aborts: list[AbortV1] = Field(default=[])
    trace: list[dict[str, Any]] | None = None


def check_v0(data: dict[str, Any]) -> None:
    """ScenarioError for what is not of the form of v0 and v0bm1."""
    check(FileV0, data)
    _check_ids(data["requests"])
    for i, request in enumerate(data["requests"]):
        _check_samples(request, f"requests[{i}]")


def check_v1(data: dict[str, Any]) -> None:
    """ScenarioError for what is not of the form of v1."""
    check(FileV1, data)
    _check_ids(data["requests"])
    for i, request in enumerate(data["requests"]):
        if data["config"].get("num_spec_tokens") and "draft_ok" not in request:
            raise ScenarioError(f"field 'requests[{i}].draft_ok' is missing")


def _check_ids(requests: list[dict[str, Any]]) -> None:
    seen: set[str] = set()
    for i, request in enumerate(requests):
        if request["id"] in seen:
            raise refused(f"requests[{i}].id", "another request has this id", request["id"])
        seen.add(request["id"])


def _check_samples(request: dict[str, Any], where: str) -> None:
    num_samples, outputs = request["n"], request["outputs"]
    if len(outputs) != num_samples:
        raise refused(f"{where}.outputs", f"Input should have one list for each of n = {num_samples}", outputs)
    for i, parents in enumerate(request.get("beam_parents") or []):
        if len(parents) != num_samples or max(parents) >= num_samples:
            message = f"Input should have one parent, below n, for each of n = {num_samples}"
            raise refused(f"{where}.beam_parents[{i}]", message, parents)
