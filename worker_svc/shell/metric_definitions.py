"""All metrics of a worker, with what each counts (svc_common.observability.metrics)."""

from svc_common.observability.metrics import DROPPED_SPANS, Kind, MetricSpec, seconds_from

PARTS = ("queued", "cache", "prepare", "model", "sample")

READY = MetricSpec(
    name="quire_worker_ready",
    kind=Kind.GAUGE,
    unit="1",
    text="1: the model is loaded and steps can run.",
    formula="1 in the state READY, else 0; equal to the health service's status.",
    serves="health",
    query="quire_worker_ready == 0",
)
STEPS = MetricSpec(
    name="quire_worker_steps_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="steps",
    text="Steps that ran and did not fail.",
    formula="One per result without an error, including steps that only remove rows.",
    serves="step statistics",
    query="rate(quire_worker_steps_total[1m])",
)
STEP_SECONDS = MetricSpec(
    name="quire_worker_step_seconds",
    kind=Kind.HISTOGRAM,
    of_model=True,
    unit="seconds",
    text="Time of each part of a step.",
    formula=(
        "The result's `timings`, one value per part and step of `quire_worker_steps_total`. `queued`: from arrival to launch, "
        "behind other steps. `cache`: swaps and copies. `prepare`: inputs. `model`: the forward pass. `sample`: tokens. The last "
        "four add up to the step's duration at the scheduler."
    ),
    labels={"part": ", ".join(f"`{part}`" for part in PARTS)},
    serves="step statistics; the same times as in the step span of a trace",
    query="sum by (part) (rate(quire_worker_step_seconds_sum[1m])) / on () group_left sum(rate(quire_worker_steps_total[1m]))",
    buckets=seconds_from(0.00001, 30),
)
MASK_SECONDS = MetricSpec(
    name="quire_worker_mask_seconds",
    kind=Kind.HISTOGRAM,
    unit="seconds",
    text="CPU time of a step's grammar masks.",
    formula=(
        "`mask_ns` of the result's `timings`, of steps that computed masks: total CPU time of the threads that compute them, for "
        "all rows. They run in parallel with the model, so no other part of the step includes it."
    ),
    serves="structured output: cost of grammars",
    query="rate(quire_worker_mask_seconds_sum[1m])",
    buckets=seconds_from(0.00001, 30),
)
ROWS = MetricSpec(
    name="quire_worker_rows",
    kind=Kind.GAUGE,
    of_model=True,
    unit="rows",
    text="Sequences on the worker.",
    formula="Rows added minus rows removed in the present epoch; refused steps do not count.",
    serves="step statistics",
    query="max_over_time(quire_worker_rows[5m])",
)
TOKENS = MetricSpec(
    name="quire_worker_tokens_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="tokens",
    text="Tokens computed and sampled by steps.",
    formula="`computed`: tokens with KV computed, as counted by the worker. `sampled`: tokens in results, of all rows.",
    labels={"kind": "`computed`, `sampled`"},
    serves="step statistics",
    query="sum by (kind) (rate(quire_worker_tokens_total[1m]))",
)
MOVED = MetricSpec(
    name="quire_worker_blocks_moved_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="blocks",
    text="KV blocks moved by steps.",
    formula="Pairs in a step's swap-in, swap-out and copy maps, of steps that did not fail.",
    labels={"kind": "`swap_in`, `swap_out`, `copy`"},
    serves="step statistics",
    query="sum by (kind) (rate(quire_worker_blocks_moved_total[5m]))",
)
NOT_FINITE_ROWS = MetricSpec(
    name="quire_worker_not_finite_rows_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="rows",
    text="Rows for which the model's output was NaN or infinite.",
    formula="Rows with ROW_FLAG_NOT_FINITE in results; only their requests fail.",
    serves="faults: what failed, and how often",
    query="increase(quire_worker_not_finite_rows_total[1h]) > 0",
)
FAILED_STEPS = MetricSpec(
    name="quire_worker_failed_steps_total",
    kind=Kind.COUNTER,
    of_model=True,
    unit="steps",
    text="Steps that failed as a whole.",
    formula="One per result with an error, by its reason.",
    labels={"reason": "one of [errors](errors.md)"},
    serves="faults: what failed, and how often",
    query="sum by (reason) (increase(quire_worker_failed_steps_total[1h])) > 0",
)

METRICS = (READY, STEPS, STEP_SECONDS, MASK_SECONDS, ROWS, TOKENS, MOVED, NOT_FINITE_ROWS, FAILED_STEPS, DROPPED_SPANS)
