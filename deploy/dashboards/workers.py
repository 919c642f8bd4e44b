"""Dashboard of the workers: time spent in each part of a step."""

from deploy.dashboards.grafana import Dashboard, Panel, Query
from deploy.dashboards.queries import RATE, distribution, processes, rate

_TOKENS = "suffix: tokens/s"

WORKERS = Dashboard(
    "workers",
    "workers",
    "Availability of workers, time spent in the parts of a step, and throughput.",
    (
        Panel(
            title="Ready",
            text="Workers that report a loaded model and can run steps.",
            unit="none",
            kind="stat",
            width=6,
            queries=(Query("sum(quire_worker_ready)"),),
            yellow=1,
            low_is_bad=True,
        ),
        Panel(
            title="Connected",
            text="Workers with an open stream to the scheduler. Fewer than ready: a network fault, or another scheduler owns them.",
            unit="none",
            kind="stat",
            width=6,
            queries=(Query("sum(quire_worker_up)"),),
            yellow=1,
            low_is_bad=True,
        ),
        Panel(
            title="Steps",
            text="Steps per second, total of all workers.",
            unit="suffix: /s",
            kind="stat",
            width=6,
            queries=(rate("quire_worker_steps_total"),),
        ),
        Panel(
            title="Sequences",
            text="Sequences on the workers, running or between two steps.",
            unit="none",
            kind="stat",
            width=6,
            queries=(Query("sum(quire_worker_rows)"),),
        ),
        Panel(
            title="Parts of a step",
            text="Mean time of each part: queued (behind other steps), cache (swaps, copies), prepare (inputs), model, sample. "
            "With overlapped steps a long queued time is good: the next step has already arrived.",
            unit="s",
            width=12,
            stacked=True,
            queries=(
                Query(
                    f"sum by (part) (rate(quire_worker_step_seconds_sum[{RATE}])) / "
                    f"(sum by (part) (rate(quire_worker_step_seconds_count[{RATE}])) > 0)",
                    "{{part}}",
                ),
            ),
        ),
        Panel(
            title="Model utilization",
            text="Model time per second, for each worker: 100 % = the device is never idle.",
            unit="percentunit",
            width=12,
            queries=(
                Query(
                    f'sum by (instance) (rate(quire_worker_step_seconds_sum{{part="model"}}[{RATE}]))', "{{instance}}"
                ),
            ),
        ),
        Panel(
            title="Steps of each worker",
            text="Steps per second of each worker. Workers of one service should have similar values.",
            unit="suffix: /s",
            queries=(rate("quire_worker_steps_total", "instance"),),
        ),
        Panel(
            title="Sequences of each worker",
            text="Rows of the persistent batch, by worker.",
            unit="short",
            queries=(Query("sum by (instance) (quire_worker_rows)", "{{instance}}"),),
        ),
        Panel(
            title="Groups of each worker",
            text="Groups of sequences that run on each worker, by its address. Placement keeps the lines close.",
            unit="short",
            queries=(Query('sum by (worker) (quire_worker_groups{queue="running"})', "{{worker}}"),),
        ),
        Panel(
            title="Tokens",
            text="Tokens per second: computed (prompts and decodes) and sampled.",
            unit=_TOKENS,
            queries=(rate("quire_worker_tokens_total", "kind"),),
        ),
        distribution(
            "Times in the model",
            "quire_worker_step_seconds",
            "Distribution of model time over the steps of all workers. Two bands are usual: with prompts, and decode-only.",
            where='{part="model"}',
        ),
        Panel(
            title="Blocks moved",
            text="Blocks per second: swapped in, swapped out, copied on write. Moves compete with the model for the device.",
            unit="suffix: blocks/s",
            width=12,
            queries=(rate("quire_worker_blocks_moved_total", "kind"),),
        ),
        Panel(
            title="CPU time of grammar masks",
            text="CPU cores used for grammar masks, in parallel with the model. Sequences with costly grammars skip steps.",
            unit="percentunit",
            width=12,
            may_be_empty=True,
            queries=(Query(f"sum by (instance) (rate(quire_worker_mask_seconds_sum[{RATE}]))", "{{instance}}"),),
        ),
        Panel(
            title="Moved groups",
            text="Groups per second that continued on another worker with their KV, because theirs was drained.",
            unit="suffix: /s",
            may_be_empty=True,
            queries=(rate("quire_moved_groups_total"),),
        ),
        Panel(
            title="Failed steps",
            text="Failed steps per second, by reason.",
            unit="suffix: /s",
            may_be_empty=True,
            queries=(rate("quire_worker_failed_steps_total", "reason"),),
        ),
        Panel(
            title="Non-finite output",
            text="Rows per second with NaN or infinite model output. Above 0 the checkpoint, a kernel or the device is broken.",
            unit="suffix: rows/s",
            red=0.0001,
            queries=(rate("quire_worker_not_finite_rows_total"),),
        ),
        *processes("worker"),
    ),
)
