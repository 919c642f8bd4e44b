"""Metrics of the cell at a gateway, under Quire's names, and vLLM's names for them, which endpoint pickers ask for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway_svc.cell.cell_load import CellReading
from svc_common.observability.metrics import Kind, MetricSpec

_ROUTERS = "[routers](routers.md)"

REQUESTS = MetricSpec(
    name="quire_cell_requests",
    kind=Kind.GAUGE,
    unit="requests",
    text="Requests of the cell: of all gateways and workers of this gateway's scheduler.",
    formula="As `quire_scheduler_requests`, asked of the scheduler at the scrape. Every gateway of a cell gives the cell's value.",
    labels={"queue": "`waiting`, `running`, `swapped`"},
    serves=_ROUTERS,
    query="max by (queue) (quire_cell_requests)",
)
WAITING_TOKENS = MetricSpec(
    name="quire_cell_waiting_tokens",
    kind=Kind.GAUGE,
    unit="tokens",
    text="Prompt tokens of the cell's requests that wait for their first step.",
    formula="As `quire_scheduler_waiting_tokens`.",
    serves=_ROUTERS,
    query="max(quire_cell_waiting_tokens)",
)
KV_USAGE = MetricSpec(
    name="quire_cell_kv_usage_ratio",
    kind=Kind.GAUGE,
    unit="1",
    text="Part of the KV blocks of all workers that running requests hold, 0 to 1.",
    formula="Blocks that are not free / all. Blocks with cached prefixes that no request holds are free.",
    serves=_ROUTERS,
    query="max(quire_cell_kv_usage_ratio)",
)
ADAPTER_REQUESTS = MetricSpec(
    name="quire_cell_adapter_requests",
    kind=Kind.GAUGE,
    unit="requests",
    text="Requests of the cell by adapter; adapters without requests are left out.",
    formula="Requests that name the adapter: `waiting` = never scheduled, `running` = scheduled and not ended.",
    labels={"adapter": "the loaded adapters", "state": "`waiting`, `running`"},
    serves=_ROUTERS,
    query="max by (adapter, state) (quire_cell_adapter_requests)",
)
QUEUED_WORK = MetricSpec(
    name="quire_queued_work_seconds",
    kind=Kind.GAUGE,
    unit="seconds",
    text="Estimated time for which the cell's workers compute what waits.",
    formula="The scheduler's metric of that name, here for autoscalers that see only gateways. Absent while its cost is unknown.",
    serves=_ROUTERS,
    query="max(quire_queued_work_seconds)",
)
AGE = MetricSpec(
    name="quire_cell_age_seconds",
    kind=Kind.GAUGE,
    unit="seconds",
    text="Age of the cell's values in this scrape.",
    formula=(
        "Time since the scheduler was asked: at most 0.1 s; up to 5 s while it does not answer. After that the scrape has none "
        "of the cell's values."
    ),
    serves=_ROUTERS,
    query="max_over_time(quire_cell_age_seconds[5m])",
)
CELL_METRICS = (REQUESTS, WAITING_TOKENS, KV_USAGE, ADAPTER_REQUESTS, QUEUED_WORK, AGE)


@dataclass(frozen=True, slots=True)
class VllmValue:
    """A gauge or counter under vLLM's name."""

    kind: Kind
    text: str
    read: Callable[[CellReading], float]


VLLM_VALUES: Mapping[str, VllmValue] = {
    "vllm:num_requests_running": VllmValue(Kind.GAUGE, "Requests that run.", lambda cell: cell.num_running),
    "vllm:num_requests_waiting": VllmValue(Kind.GAUGE, "Requests that wait.", lambda cell: cell.num_waiting),
    "vllm:kv_cache_usage_perc": VllmValue(Kind.GAUGE, "KV blocks in use, 0 to 1.", lambda cell: cell.kv_usage),
    "vllm:gpu_cache_usage_perc": VllmValue(Kind.GAUGE, "As vllm:kv_cache_usage_perc.", lambda cell: cell.kv_usage),
    "vllm:prefix_cache_queries": VllmValue(
        Kind.COUNTER, "Prompt tokens looked up in the prefix cache.", lambda cell: cell.load.totals.queried_tokens
    ),
    "vllm:prefix_cache_hits": VllmValue(
        Kind.COUNTER, "Prompt tokens found in the prefix cache.", lambda cell: cell.load.totals.hit_tokens
    ),
    "vllm:num_preemptions": VllmValue(Kind.COUNTER, "Preemptions.", lambda cell: cell.load.totals.preemptions),
    "vllm:prompt_tokens": VllmValue(
        Kind.COUNTER, "Prompt tokens computed.", lambda cell: cell.load.totals.prefill_tokens
    ),
    "vllm:generation_tokens": VllmValue(Kind.COUNTER, "Output tokens.", lambda cell: cell.load.totals.output_tokens),
}
"""By name; counters without `_total`, which the format adds."""

VLLM_HISTOGRAMS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "vllm:time_to_first_token_seconds": ("gen_ai_server_time_to_first_token_seconds", {}),
    "vllm:request_time_per_output_token_seconds": ("gen_ai_server_time_per_output_token_seconds", {}),
    "vllm:e2e_request_latency_seconds": ("gen_ai_server_request_duration_seconds", {"error_type": ""}),
    "vllm:request_prompt_tokens": ("gen_ai_client_token_usage", {"gen_ai_token_type": "input"}),
    "vllm:request_generation_tokens": ("gen_ai_client_token_usage", {"gen_ai_token_type": "output"}),
}
"""This gateway's own histograms, by vLLM's name: ours, and the labels of the series that count."""

VLLM_ADAPTERS = "vllm:lora_requests_info"
VLLM_CACHE = "vllm:cache_config_info"
