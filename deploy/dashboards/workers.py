"""Dashboard of the workers: time spent in each part of a step."""

from deploy.dashboards.grafana import Dashboard, Panel, Query
from deploy.dashboards.queries import RATE, distribution, processes, rate

_TOKENS = "suffix: tokens/s"

WORKERS = Dashboard(
    "workers",
    "workers",
    "Whether workers are there, where the time of their steps goes, what they compute.",
    (
        Panel(
            title="Ready",
            text="Workers whose model is loaded and that can run steps, as they say themselves.",
            unit="none",
            kind="stat",
            width=6,
            queries=(Query("sum(quire_worker_ready)"),),
            yellow=1,
            low_is_bad=True,
        ),
        Panel(
            title="Reached",
            text="Workers to which the scheduler's stream is open. Fewer than ready: the network, or another owner.",
            unit="none",
            kind="stat",
            width=6,
            queries=(Query("sum(quire_worker_up)"),),
            yellow=1,
            low_is_bad=True,
        ),
        Panel(
            title="Steps",
            text="Steps a second, of all workers.",
            unit="suffix: /s",
            kind="stat",
            width=6,
            queries=(rate("quire_worker_steps_total"),),
        ),
        Panel(
            title="Sequences",
            text="Sequences that workers hold, running or between two steps.",
            unit="none",
            kind="stat",
            width=6,
            queries=(Query("sum(quire_worker_rows)"),),
        ),
        Panel(
            title="Where the time of a step goes",
            text="Mean time of each part: queued (behind other steps), cache (swaps, copies), prepare (inputs), model, sample. "
            "Much queued is good while steps overlap: the next one is there already.",
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
            title="Share of time in the model",
            text="Seconds of model time in each second, for each worker: 100 % = the device is never without work.",
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
            text="A second. Workers of one service should be alike.",
            unit="suffix: /s",
            queries=(rate("quire_worker_steps_total", "instance"),),
        ),
        Panel(
            title="Sequences of each worker",
            text="Rows of the persistent batch.",
            unit="short",
            queries=(Query("sum by (instance) (quire_worker_rows)", "{{instance}}"),),
        ),
        Panel(
            title="Tokens",
            text="A second: computed (prompts and decodes) and drawn.",
            unit=_TOKENS,
            queries=(rate("quire_worker_tokens_total", "kind"),),
        ),
        distribution(
            "Times in the model",
            "quire_worker_step_seconds",
            "How many steps were how long in the model, of all workers. Two bands: with prompts, and decodes alone.",
            where='{part="model"}',
        ),
        Panel(
            title="Blocks moved",
            text="Blocks a second: swapped in, swapped out, copied on write. They share the device with the model.",
            unit="suffix: blocks/s",
            width=12,
            queries=(rate("quire_worker_blocks_moved_total", "kind"),),
        ),
        Panel(
            title="Processor time of grammar masks",
            text="Processors kept busy by computing grammar masks, beside the model. Sequences with costly grammars sit out steps.",
            unit="percentunit",
            width=12,
            may_be_empty=True,
            queries=(Query(f"sum by (instance) (rate(quire_worker_mask_seconds_sum[{RATE}]))", "{{instance}}"),),
        ),
        Panel(
            title="Failed steps",
            text="Steps a second that failed as a whole, by reason.",
            unit="suffix: /s",
            may_be_empty=True,
            queries=(rate("quire_worker_failed_steps_total", "reason"),),
        ),
        Panel(
            title="Output that is no number",
            text="Rows a second for which the model gave NaN or infinity. Anything but 0 is a broken checkpoint, kernel or device.",
            unit="suffix: rows/s",
            red=0.0001,
            queries=(rate("quire_worker_not_finite_rows_total"),),
        ),
        *processes("worker"),
    ),
)
