"""Dashboard of the scheduler: waiting requests with their reasons, and steps."""

from deploy.dashboards.grafana import Dashboard, Panel, Query
from deploy.dashboards.queries import RATE, distribution, processes, quantiles, rate

_TOKENS = "suffix: tokens/s"
_FILL = 'sum(quire_scheduler_{what}) / sum(quire_scheduler_waiting_limit{{of="{of}"}})'

SCHEDULER = Dashboard(
    "scheduler",
    "scheduler",
    "Why requests wait, what steps are made of, how long they take, who had to leave.",
    (
        Panel(
            title="Why requests wait",
            text="Requests that wait, by reason. BEHIND: nobody looked at them, as somebody before them could not start; why the "
            "head of the queue waits is among the others. What each means: docs/explaining.md; one request: `quire why ID`.",
            unit="short",
            width=12,
            stacked=True,
            may_be_empty=True,
            queries=(Query("sum by (reason) (quire_scheduler_waiting_by_reason) > 0", "{{reason}}"),),
        ),
        Panel(
            title="Queue time",
            text="From arrival to the first step, of requests that started then.",
            unit="s",
            width=12,
            queries=quantiles("quire_queue_time_seconds"),
        ),
        Panel(
            title="How full the queue is",
            text="Share of what may wait, in requests and in prompt tokens. At 100 % requests are refused with QUEUE_FULL.",
            unit="percentunit",
            most=1,
            yellow=0.8,
            red=1,
            queries=(
                Query(_FILL.format(what='requests{queue="waiting"}', of="requests"), "requests"),
                Query(_FILL.format(what="waiting_tokens", of="tokens"), "prompt tokens"),
            ),
        ),
        Panel(
            title="Refused",
            text="Requests a second that the scheduler did not accept, by reason. Gateways refuse too: see theirs.",
            unit="reqps",
            may_be_empty=True,
            queries=(rate("quire_requests_refused_total", "reason"),),
        ),
        Panel(
            title="Preemptions",
            text="A second, by mode. Each loses what was computed (recompute) or moves it to the host (swap): more blocks, fewer "
            "sequences at a time, or shorter outputs help.",
            unit="suffix: /s",
            may_be_empty=True,
            queries=(rate("quire_preemptions_total", "mode"),),
        ),
        distribution(
            "Step times",
            "quire_step_duration_seconds",
            "How many steps took how long at the worker. Two bands: steps with prompts, and steps of decodes alone.",
        ),
        Panel(
            title="Step time",
            text="What a step took its worker.",
            unit="s",
            width=12,
            queries=quantiles("quire_step_duration_seconds"),
        ),
        Panel(
            title="Tokens in steps",
            text="Tokens a second that steps computed: prefill (prompts, and what is computed again) and decode.",
            unit=_TOKENS,
            stacked=True,
            queries=(rate("quire_step_tokens_total", "phase"),),
        ),
        Panel(
            title="Steps",
            text="Steps a second, and those of them that computed prompts.",
            unit="suffix: /s",
            queries=(
                Query(f"sum(rate(quire_steps_total[{RATE}]))", "all"),
                Query(f"sum(rate(quire_prompt_steps_total[{RATE}]))", "with prompts"),
            ),
        ),
        Panel(
            title="Time to decide a step",
            text="One call of schedule(). While steps overlap it costs nothing as long as it is shorter than a step.",
            unit="s",
            queries=quantiles("quire_schedule_duration_seconds"),
        ),
        Panel(
            title="Requests that ended",
            text="A second, by status and reason.",
            unit="reqps",
            stacked=True,
            queries=(rate("quire_requests_ended_total", "status", "reason"),),
        ),
        Panel(
            title="Failed steps",
            text="A second, by reason. Each is in the scheduler's log with what ran in it.",
            unit="suffix: /s",
            may_be_empty=True,
            queries=(rate("quire_failed_steps_total", "reason"),),
        ),
        Panel(
            title="Spans that were dropped",
            text="Spans a second that did not reach the collector, of any service.",
            unit="suffix: /s",
            queries=(rate("quire_telemetry_dropped_spans_total", "job"),),
        ),
        *processes("scheduler"),
    ),
)
