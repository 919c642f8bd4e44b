"""All metrics of the scheduler, with what each counts (svc_common.observability.metrics)."""

from scheduler_svc.core.reasons import Reason
from svc_common.observability.metrics import DROPPED_SPANS, Kind, MetricSpec, seconds_from

STEP_SECONDS = seconds_from(0.00025, 24)
QUEUE_SECONDS = seconds_from(0.001, 30)
SCHEDULE_SECONDS = seconds_from(0.00001, 22)

NEVER_WAITS = (Reason.RUNNING, Reason.ENDED)
WAIT_REASONS = tuple(reason.value for reason in Reason if reason not in NEVER_WAITS)

# --- read when somebody asks ----------------------------------------------------------------------------------------

REQUESTS = MetricSpec(
    name="quire_scheduler_requests",
    kind=Kind.GAUGE,
    of_model=True,
    unit="groups",
    text="Groups of sequences in each queue.",
    formula=(
        "Length of the core's queues, as a step's report has them. `waiting` has besides the requests that are accepted and have "
        "not reached the core: it is between two steps that they do, and without a worker they do not."
    ),
    labels={"queue": "`waiting`, `running`, `swapped`"},
    serves="R5, R24, R36",
    query="sum by (queue) (quire_scheduler_requests)",
)
WAITING_BY_REASON = MetricSpec(
    name="quire_scheduler_waiting_by_reason",
    kind=Kind.GAUGE,
    of_model=True,
    unit="requests",
    text="Requests that wait, by what they wait for.",
    formula=(
        "Requests that have not ended and stand in the waiting or the swapped queue, by the reason that `quire why` gives at that "
        "moment. Those behind the head of their queue, which nobody looked at, are `BEHIND`."
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
    formula="Sum of their prompts' lengths; what `--max-waiting-tokens` bounds.",
    serves="[overload](overload.md)",
    query='quire_scheduler_waiting_tokens / on (instance) quire_scheduler_waiting_limit{of="tokens"}',
)
WAITING_LIMIT = MetricSpec(
    name="quire_scheduler_waiting_limit",
    kind=Kind.GAUGE,
    unit="1",
    text="How many requests, and prompt tokens, may wait for their first step.",
    formula="The settings `--max-waiting-requests` and `--max-waiting-tokens`.",
    labels={"of": "`requests`, `tokens`"},
    serves="[overload](overload.md)",
    query='quire_scheduler_requests{queue="waiting"} / on (instance) quire_scheduler_waiting_limit{of="requests"}',
)
SERVING = MetricSpec(
    name="quire_scheduler_serving",
    kind=Kind.GAUGE,
    unit="1",
    text="1: requests are taken and steps can complete.",
    formula="1 while a worker can run steps and no operator drains this scheduler, else 0; what the health service says.",
    serves="health",
    query="min_over_time(quire_scheduler_serving[5m]) == 0",
)
WORKER_UP = MetricSpec(
    name="quire_worker_up",
    kind=Kind.GAUGE,
    unit="1",
    text="1: the stream of steps to the worker is open.",
    formula="1 while the worker with that address can be sent steps, else 0.",
    labels={"worker": "the addresses given by `--worker`"},
    serves="faults: who is away",
    query="quire_worker_up == 0",
)
BLOCKS = MetricSpec(
    name="quire_kv_blocks",
    kind=Kind.GAUGE,
    of_model=True,
    unit="blocks",
    text="KV blocks of all workers, by what they are to the ledger.",
    formula=(
        "`used`: referenced by a sequence. `cached`: referenced by nobody, with a known prefix in it. `free`: referenced by nobody "
        "and without one. The three add up to what sequences can use; a new block is taken from the last two."
    ),
    labels={"tier": "`gpu` (the device, a CPU's too), `cpu` (the host)", "state": "`used`, `free`, `cached`"},
    serves="R17, R36, R209",
    query='sum by (tier) (quire_kv_blocks{state="used"}) / sum by (tier) (quire_kv_blocks)',
)

# --- counted by steps -----------------------------------------------------------------------------------------------

STEPS = MetricSpec(
    name="quire_steps_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="steps",
    text="Steps that are over.",
    formula="One for each step of `quire steps`, whatever became of it. A plan without work is no step (R6).",
    serves="R5, R6",
    query="rate(quire_steps_total[1m])",
)
STEP_DURATION = MetricSpec(
    name="quire_step_duration_seconds",
    kind=Kind.HISTOGRAM,
    of_model=True,
    unit="seconds",
    text="What a step took its worker.",
    formula=(
        "`duration_ns` of the step's report: cache, preparation, model and sampling, as the worker measured them; without the time "
        "on the wire and in queues. Failed steps are not observed."
    ),
    serves="R5; the buckets of OpenTelemetry's time per token are too coarse for a GPU",
    query="histogram_quantile(0.99, sum by (le) (rate(quire_step_duration_seconds_bucket[5m])))",
    buckets=STEP_SECONDS,
)
SCHEDULE_DURATION = MetricSpec(
    name="quire_schedule_duration_seconds",
    kind=Kind.HISTOGRAM,
    of_model=True,
    unit="seconds",
    text="What the scheduler took to decide a step.",
    formula="`times.schedule_ns` of the step's report: one call of the core's `schedule()`, which plans all ranks at once.",
    serves="the scheduler's share of a step",
    query=("sum(rate(quire_schedule_duration_seconds_sum[5m])) / sum(rate(quire_step_duration_seconds_sum[5m]))"),
    buckets=SCHEDULE_SECONDS,
)
STEP_TOKENS = MetricSpec(
    name="quire_step_tokens_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="tokens",
    text="Tokens that steps computed, by phase.",
    formula=(
        "Tokens of all shares of a step's plan: `prefill` of sequences whose prompt (or what is computed again after a preemption) "
        "is under way, `decode` of the others, guesses to verify included. Failed steps count too: they were batched."
    ),
    labels={"phase": "`prefill`, `decode`"},
    serves="R5 (batched tokens), R48",
    query="sum by (phase) (rate(quire_step_tokens_total[1m]))",
)
PROMPT_STEPS = MetricSpec(
    name="quire_prompt_steps_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="steps",
    text="Steps with prompt tokens in them.",
    formula="Those of `quire_steps_total` with at least one prefill share.",
    serves="R5 (prompt-run flag)",
    query="rate(quire_prompt_steps_total[1m]) / rate(quire_steps_total[1m])",
)
OUTPUT_TOKENS = MetricSpec(
    name="quire_output_tokens_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="tokens",
    text="Tokens that came out of steps.",
    formula="`sampled` of the step's report, all sequences. Of samples that are ranked, those count too that nobody is given.",
    serves="R5",
    query="sum(rate(quire_output_tokens_total[1m]))",
)
SWAPPED_BLOCKS = MetricSpec(
    name="quire_kv_swap_blocks_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="blocks",
    text="KV blocks that steps moved between device and host.",
    formula="Pairs in `swap_in` and `swap_out` of the step's report.",
    labels={"direction": "`in` (to the device), `out`"},
    serves="R5, R36",
    query="sum by (direction) (rate(quire_kv_swap_blocks_total[5m]))",
)
COPIED_BLOCKS = MetricSpec(
    name="quire_kv_copied_blocks_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="blocks",
    text="KV blocks that steps copied on write.",
    formula="Pairs in `copy` of the step's report.",
    serves="R5",
    query="rate(quire_kv_copied_blocks_total[5m])",
)
FAILED_STEPS = MetricSpec(
    name="quire_failed_steps_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="steps",
    text="Steps of which a request got less than it should.",
    formula=(
        "`WORKER_LOST`: the worker went, or was let go, before the result could be read. `NOT_FINITE`: the model's output for at "
        "least one sequence was NaN or infinite; the others' tokens count. Else the reason of the error by which the worker failed "
        "the whole step. Each is in the log with what ran in it."
    ),
    labels={"reason": "`WORKER_LOST`, `NOT_FINITE`, or one of [errors](errors.md)"},
    serves="faults: what failed, and how often",
    query="sum by (reason) (increase(quire_failed_steps_total[1h])) > 0",
)

# --- counted by requests --------------------------------------------------------------------------------------------

PREEMPTIONS = MetricSpec(
    name="quire_preemptions_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="preemptions",
    text="Times that a running group had to leave.",
    formula="One for each entry in `preempted` of a plan, also of a plan that is no step.",
    labels={"mode": "`recompute`, `swap`"},
    serves="R46, R80",
    query="sum by (mode) (rate(quire_preemptions_total[5m]))",
)
QUEUE_TIME = MetricSpec(
    name="quire_queue_time_seconds",
    kind=Kind.HISTOGRAM,
    of_model=True,
    unit="seconds",
    text="How long requests waited for their first step.",
    formula="From a request's arrival to its first plan; once for each request that starts.",
    serves="R24; the same as the queue span of a trace",
    query="histogram_quantile(0.95, sum by (le) (rate(quire_queue_time_seconds_bucket[5m])))",
    buckets=QUEUE_SECONDS,
)
QUERIED_TOKENS = MetricSpec(
    name="quire_prefix_cache_queried_tokens_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="tokens",
    text="Prompt tokens that were looked for in the prefix cache.",
    formula="The length of a request's prompt, once, when it starts; with the cache switched off too.",
    serves="R119",
    query="rate(quire_prefix_cache_queried_tokens_total[5m])",
)
HIT_TOKENS = MetricSpec(
    name="quire_prefix_cache_hit_tokens_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="tokens",
    text="Of these, tokens that were found and not computed again.",
    formula="`cached_prompt_tokens` of its usage, once, when it starts.",
    serves="R119",
    query="rate(quire_prefix_cache_hit_tokens_total[5m]) / rate(quire_prefix_cache_queried_tokens_total[5m])",
)
REFUSED = MetricSpec(
    name="quire_requests_refused_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="requests",
    text="Requests that were not accepted.",
    formula=(
        "One for each Submit that was answered by an error at once. What gateways refuse by themselves, because the queue is full, "
        "is in their own `quire_gateway_errors_total`."
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
    text="Accepted requests that ended.",
    formula="One for each accepted request, at its single end. With several choices the reason is that of the first.",
    labels={
        "status": "`OK`, `CANCELLED`, or the status of its error",
        "reason": "`STOP`, `LENGTH`, `CANCELLED`, or the error's, one of [errors](errors.md)",
    },
    serves="R5, R35",
    query='sum by (reason) (rate(quire_requests_ended_total{status!~"OK|CANCELLED"}[5m]))',
)

READ = (REQUESTS, WAITING_BY_REASON, WAITING_TOKENS, WAITING_LIMIT, SERVING, WORKER_UP, BLOCKS)
COUNTED_BY_STEPS = (
    *(STEPS, STEP_DURATION, SCHEDULE_DURATION, STEP_TOKENS, PROMPT_STEPS, OUTPUT_TOKENS, SWAPPED_BLOCKS, COPIED_BLOCKS),
    FAILED_STEPS,
)
COUNTED_BY_REQUESTS = (PREEMPTIONS, QUEUE_TIME, QUERIED_TOKENS, HIT_TOKENS, REFUSED, ENDED)
METRICS = (*READ, *COUNTED_BY_STEPS, *COUNTED_BY_REQUESTS, DROPPED_SPANS)
