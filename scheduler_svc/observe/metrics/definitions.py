"""All metrics of the scheduler, with what each counts (svc_common.observability.metrics)."""

from scheduler_svc.core.reasons import Reason, Revocation
from svc_common.observability.metrics import DROPPED_SPANS, Kind, MetricSpec, seconds_from

STEP_SECONDS = seconds_from(0.00025, 24)
QUEUE_SECONDS = seconds_from(0.001, 30)
SCHEDULE_SECONDS = seconds_from(0.00001, 22)

NEVER_WAITS = (Reason.RUNNING, Reason.ENDED)
WAIT_REASONS = tuple(reason.value for reason in Reason if reason not in NEVER_WAITS)

# --- read at each scrape --------------------------------------------------------------------------------------------

REQUESTS = MetricSpec(
    name="quire_scheduler_requests",
    kind=Kind.GAUGE,
    of_model=True,
    unit="groups",
    text="Groups of sequences in each queue.",
    formula=(
        "Length of the core's queues, as in a step's report. `waiting` also includes accepted requests that have not reached the "
        "core: they enter it between two steps, and not while there is no worker."
    ),
    labels={"queue": "`waiting`, `running`, `swapped`"},
    serves="queue lengths",
    query="sum by (queue) (quire_scheduler_requests)",
)
WAITING_BY_REASON = MetricSpec(
    name="quire_scheduler_waiting_by_reason",
    kind=Kind.GAUGE,
    of_model=True,
    unit="requests",
    text="Waiting requests, by reason.",
    formula=(
        "Requests in the waiting or the swapped queue, by the reason that `quire why` gives at that moment. Requests behind the "
        "head of their queue, which the last step did not examine, are `BEHIND`."
    ),
    labels={"reason": ", ".join(f"`{reason}`" for reason in WAIT_REASONS)},
    serves="[explaining](explaining.md): why requests wait",
    query="topk(3, sum by (reason) (quire_scheduler_waiting_by_reason) > 0)",
)
WAITING_TOKENS = MetricSpec(
    name="quire_scheduler_waiting_tokens",
    kind=Kind.GAUGE,
    of_model=True,
    unit="tokens",
    text="Prompt tokens of the requests that wait for their first step.",
    formula="Sum of their prompt lengths; limited by `--max-waiting-tokens`.",
    serves="[overload](overload.md)",
    query='quire_scheduler_waiting_tokens / on (instance) quire_scheduler_waiting_limit{of="tokens"}',
)
WAITING_LIMIT = MetricSpec(
    name="quire_scheduler_waiting_limit",
    kind=Kind.GAUGE,
    unit="1",
    text="Maximum number of requests, and of prompt tokens, that may wait for their first step.",
    formula="The settings `--max-waiting-requests` and `--max-waiting-tokens`.",
    labels={"of": "`requests`, `tokens`"},
    serves="[overload](overload.md)",
    query='quire_scheduler_requests{queue="waiting"} / on (instance) quire_scheduler_waiting_limit{of="requests"}',
)
QUEUED_WORK = MetricSpec(
    name="quire_queued_work_seconds",
    kind=Kind.GAUGE,
    of_model=True,
    unit="seconds",
    text="Estimated time for which all workers compute what waits.",
    formula=(
        "Prompt tokens of waiting requests and uncomputed ones of running requests, at the measured cost of a token, and the "
        "expected outputs of waiting requests at the pace of the present batch; over all workers. Absent while its cost is unknown."
    ),
    serves="[routers](routers.md): autoscaling by seconds of queued work",
    query="max(quire_queued_work_seconds)",
)
SERVING = MetricSpec(
    name="quire_scheduler_serving",
    kind=Kind.GAUGE,
    unit="1",
    text="1: requests are accepted and steps can complete.",
    formula="1 while a worker can run steps and this scheduler is not being drained, else 0; equals the health status.",
    serves="health",
    query="min_over_time(quire_scheduler_serving[5m]) == 0",
)
WORKER_UP = MetricSpec(
    name="quire_worker_up",
    kind=Kind.GAUGE,
    unit="1",
    text="1: the worker's step stream is open.",
    formula="1 while steps can be sent to the worker at that address, else 0.",
    labels={"worker": "the addresses given by `--worker`"},
    serves="faults: unreachable workers",
    query="quire_worker_up == 0",
)
WORKER_GROUPS = MetricSpec(
    name="quire_worker_groups",
    kind=Kind.GAUGE,
    unit="groups",
    text="Groups of sequences bound to each worker.",
    formula="Length of the running and of the swapped queue of the worker at that address; not reported of dp ranks.",
    labels={"worker": "the addresses given by `--worker`", "queue": "`running`, `swapped`"},
    serves="balance between workers",
    query='max(quire_worker_groups{queue="running"}) / avg(quire_worker_groups{queue="running"})',
)
BLOCKS = MetricSpec(
    name="quire_kv_blocks",
    kind=Kind.GAUGE,
    of_model=True,
    unit="blocks",
    text="KV blocks of all workers, by state.",
    formula=(
        "`used`: referenced by a sequence. `cached`: not referenced, holds a known prefix. `free`: not referenced, holds nothing. "
        "The three add up to the usable blocks; new blocks are allocated from `free` and `cached`."
    ),
    labels={
        "tier": "`gpu` (the device, also where it is a CPU), `cpu` (the host)",
        "state": "`used`, `free`, `cached`",
    },
    serves="KV cache usage",
    query='sum by (tier) (quire_kv_blocks{state="used"}) / sum by (tier) (quire_kv_blocks)',
)

# --- counted by steps -----------------------------------------------------------------------------------------------

STEPS = MetricSpec(
    name="quire_steps_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="steps",
    text="Completed steps.",
    formula="One per step of `quire steps`, whether it succeeded or failed. A plan without work is not a step.",
    serves="step rate",
    query="rate(quire_steps_total[1m])",
)
STEP_DURATION = MetricSpec(
    name="quire_step_duration_seconds",
    kind=Kind.HISTOGRAM,
    of_model=True,
    unit="seconds",
    text="Duration of a step at its worker.",
    formula=(
        "`duration_ns` of the step's report: cache operations, preparation, model and sampling, measured by the worker; excludes "
        "the time on the wire and in queues. Failed steps are not observed."
    ),
    serves="step speed; the buckets of OpenTelemetry's time per token are too coarse for a GPU",
    query="histogram_quantile(0.99, sum by (le) (rate(quire_step_duration_seconds_bucket[5m])))",
    buckets=STEP_SECONDS,
)
SCHEDULE_DURATION = MetricSpec(
    name="quire_schedule_duration_seconds",
    kind=Kind.HISTOGRAM,
    of_model=True,
    unit="seconds",
    text="Duration of planning a step at the scheduler.",
    formula="`times.schedule_ns` of the step's report: one call of the core's `schedule()`, which plans all ranks at once.",
    serves="the scheduler's share of a step's time",
    query=("sum(rate(quire_schedule_duration_seconds_sum[5m])) / sum(rate(quire_step_duration_seconds_sum[5m]))"),
    buckets=SCHEDULE_SECONDS,
)
STEP_TOKENS = MetricSpec(
    name="quire_step_tokens_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="tokens",
    text="Tokens computed by steps, by phase.",
    formula=(
        "All tokens of a step's plan: `prefill` for sequences in the prompt phase (recomputation after a preemption included), "
        "`decode` for the others, draft tokens included. Failed steps count, since they were batched."
    ),
    labels={"phase": "`prefill`, `decode`"},
    serves="batch size; prefill and decode in one step",
    query="sum by (phase) (rate(quire_step_tokens_total[1m]))",
)
PROMPT_STEPS = MetricSpec(
    name="quire_prompt_steps_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="steps",
    text="Steps with prompt tokens.",
    formula="Steps of `quire_steps_total` with at least one sequence in the prompt phase.",
    serves="share of steps that compute prompts",
    query="rate(quire_prompt_steps_total[1m]) / rate(quire_steps_total[1m])",
)
REPEATED_STEPS = MetricSpec(
    name="quire_repeated_steps_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="steps",
    text="Decode steps that a worker repeated by a grant, without waiting for their plans.",
    formula="Steps of `quire_steps_total` with `is_repeat` in their report.",
    serves="decode grants: share of steps without a wait between plan and step",
    query="rate(quire_repeated_steps_total[1m]) / rate(quire_steps_total[1m])",
)
REVOKED_GRANTS = MetricSpec(
    name="quire_revoked_grants_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="grants",
    text="Grants of decode steps that were revoked before their last step, by reason.",
    formula="One per plan with `revoked`, also of a plan without work.",
    labels={"reason": ", ".join(f"`{reason}`" for reason in Revocation)},
    serves="decode grants: why they end early",
    query="sum by (reason) (rate(quire_revoked_grants_total[5m]))",
)
OUTPUT_TOKENS = MetricSpec(
    name="quire_output_tokens_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="tokens",
    text="Output tokens of steps.",
    formula="`sampled` of the step's report, over all sequences. Includes `best_of` samples and beams that are not returned.",
    serves="throughput",
    query="sum(rate(quire_output_tokens_total[1m]))",
)
SWAPPED_BLOCKS = MetricSpec(
    name="quire_kv_swap_blocks_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="blocks",
    text="KV blocks moved between device and host.",
    formula="Pairs in `swap_in` and `swap_out` of the step's report.",
    labels={"direction": "`in` (to the device), `out`"},
    serves="cost of preemption by swapping",
    query="sum by (direction) (rate(quire_kv_swap_blocks_total[5m]))",
)
COPIED_BLOCKS = MetricSpec(
    name="quire_kv_copied_blocks_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="blocks",
    text="KV blocks copied on write.",
    formula="Pairs in `copy` of the step's report.",
    serves="copy-on-write",
    query="rate(quire_kv_copied_blocks_total[5m])",
)
MOVED_GROUPS = MetricSpec(
    name="quire_moved_groups_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="groups",
    text="Running groups that continued on another worker, with their KV.",
    formula="Images in `placed` of a plan. Groups that are computed again elsewhere are not counted.",
    serves="drains of workers",
    query="rate(quire_moved_groups_total[5m])",
)
FAILED_STEPS = MetricSpec(
    name="quire_failed_steps_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="steps",
    text="Failed steps, by reason.",
    formula=(
        "`WORKER_LOST`: the worker was lost or released before its result was read. `NOT_FINITE`: the model's output for "
        "at least one sequence was NaN or infinite; the other sequences keep their tokens. Else the reason of the error with which "
        "the worker failed the whole step. The log has a line per failed step with its requests."
    ),
    labels={"reason": "`WORKER_LOST`, `NOT_FINITE`, or one of [errors](errors.md)"},
    serves="faults: reasons and rates",
    query="sum by (reason) (increase(quire_failed_steps_total[1h])) > 0",
)

# --- counted by requests --------------------------------------------------------------------------------------------

PREEMPTIONS = MetricSpec(
    name="quire_preemptions_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="preemptions",
    text="Preemptions of running groups.",
    formula="One per entry in `preempted` of a plan, also of a plan without work.",
    labels={"mode": "`recompute`, `swap`"},
    serves="memory pressure",
    query="sum by (mode) (rate(quire_preemptions_total[5m]))",
)
QUEUE_TIME = MetricSpec(
    name="quire_queue_time_seconds",
    kind=Kind.HISTOGRAM,
    of_model=True,
    unit="seconds",
    text="Time that requests waited for their first step.",
    formula="From a request's arrival to its first plan; one observation per request that starts.",
    serves="queueing; the same as the queue span of a trace",
    query="histogram_quantile(0.95, sum by (le) (rate(quire_queue_time_seconds_bucket[5m])))",
    buckets=QUEUE_SECONDS,
)
QUERIED_TOKENS = MetricSpec(
    name="quire_prefix_cache_queried_tokens_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="tokens",
    text="Prompt tokens looked up in the prefix cache.",
    formula="A request's prompt length, counted once when it starts; also with the cache switched off.",
    serves="prefix cache hit rate",
    query="rate(quire_prefix_cache_queried_tokens_total[5m])",
)
HIT_TOKENS = MetricSpec(
    name="quire_prefix_cache_hit_tokens_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="tokens",
    text="Prompt tokens found in the prefix cache and not computed again.",
    formula="`cached_prompt_tokens` of a request's usage, counted once when it starts.",
    serves="prefix cache hit rate",
    query="rate(quire_prefix_cache_hit_tokens_total[5m]) / rate(quire_prefix_cache_queried_tokens_total[5m])",
)
REFUSED = MetricSpec(
    name="quire_requests_refused_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="requests",
    text="Refused requests, by reason.",
    formula=(
        "One per Submit that was answered with an error at once. Requests that a gateway refuses by itself, because the queue is "
        "full, are counted in its `quire_gateway_errors_total`."
    ),
    labels={"reason": "one of [errors](errors.md): `QUEUE_FULL`, `DRAINING`, `DUPLICATE_REQUEST`, ..."},
    serves="[overload](overload.md)",
    query="sum by (reason) (rate(quire_requests_refused_total[5m]))",
)
ENDED = MetricSpec(
    name="quire_requests_ended_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="requests",
    text="Ended requests, by status and reason.",
    formula="One per accepted request, at its end. With several choices the reason is that of the first.",
    labels={
        "status": "`OK`, `CANCELLED`, or the status of its error",
        "reason": "`STOP`, `LENGTH`, `CANCELLED`, or the error's, one of [errors](errors.md)",
    },
    serves="outcomes",
    query='sum by (reason) (rate(quire_requests_ended_total{status!~"OK|CANCELLED"}[5m]))',
)

STORED_RESPONSES = MetricSpec(
    name="quire_scheduler_stored_responses",
    kind=Kind.GAUGE,
    unit="responses",
    text="Stored responses of `/v1/responses`.",
    formula="Responses of all tenants that `previous_response_id` and `GET` find.",
    serves="[responses](responses.md)",
    query="quire_scheduler_stored_responses",
)
STORED_BYTES = MetricSpec(
    name="quire_scheduler_stored_bytes",
    kind=Kind.GAUGE,
    unit="bytes",
    text="Size of the stored responses.",
    formula="Their bytes with their conversations, and 512 for each; limited by `--max-stored-bytes`.",
    serves="[responses](responses.md)",
    query="quire_scheduler_stored_bytes",
)
DROPPED_RESPONSES = MetricSpec(
    name="quire_scheduler_dropped_responses_total",
    kind=Kind.COUNTER,
    unit="responses",
    text="Stored responses dropped without a client's `DELETE`.",
    formula="`expired`: after `--stored-s`. `displaced`: for others, when `--max-stored-bytes` was reached.",
    labels={"cause": "`expired`, `displaced`"},
    serves="[responses](responses.md): room for conversations",
    query='rate(quire_scheduler_dropped_responses_total{cause="displaced"}[5m]) > 0',
)

READ = (
    *(REQUESTS, WAITING_BY_REASON, WAITING_TOKENS, WAITING_LIMIT, QUEUED_WORK, SERVING, WORKER_UP),
    *(WORKER_GROUPS, BLOCKS),
    *(STORED_RESPONSES, STORED_BYTES, DROPPED_RESPONSES),
)
COUNTED_BY_STEPS = (
    *(STEPS, STEP_DURATION, SCHEDULE_DURATION, STEP_TOKENS, PROMPT_STEPS, REPEATED_STEPS, REVOKED_GRANTS),
    *(OUTPUT_TOKENS, SWAPPED_BLOCKS, COPIED_BLOCKS, MOVED_GROUPS, FAILED_STEPS),
)
COUNTED_BY_REQUESTS = (PREEMPTIONS, QUEUE_TIME, QUERIED_TOKENS, HIT_TOKENS, REFUSED, ENDED)
METRICS = (*READ, *COUNTED_BY_STEPS, *COUNTED_BY_REQUESTS, DROPPED_SPANS)
