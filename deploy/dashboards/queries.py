"""PromQL queries and panels that several dashboards share."""

from deploy.dashboards.grafana import Panel, Query

RATE = "$__rate_interval"


def quantiles(metric: str, *, where: str = "") -> tuple[Query, ...]:
    """Median, 95th and 99th percentile of a histogram."""
    return tuple(
        Query(f"histogram_quantile({share}, sum by (le) (rate({metric}_bucket{where}[{RATE}])))", name)
        for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    )


def rate(metric: str, *labels: str, where: str = "") -> Query:
    """Rate per second, for each value of the labels."""
    by = f"by ({', '.join(labels)}) " if labels else ""
    legend = " ".join(f"{{{{{label}}}}}" for label in labels) or "all"
    return Query(f"sum {by}(rate({metric}{where}[{RATE}]))", legend)


def distribution(title: str, metric: str, text: str, *, where: str = "") -> Panel:
    """A heatmap of a histogram over time."""
    query = Query(f"sum by (le) (increase({metric}_bucket{where}[{RATE}]))")
    return Panel(title=title, text=text, unit="short", queries=(query,), kind="heatmap", width=12)


def processes(job: str) -> tuple[Panel, Panel]:
    """Panels of memory and CPU time of a service's processes."""
    return (
        Panel(
            title="Memory",
            text="Resident memory of each process. Continuous growth indicates a leak; a jump is the load of a model or a cache.",
            unit="bytes",
            queries=(Query(f'process_resident_memory_bytes{{job="{job}"}}', "{{instance}}"),),
        ),
        Panel(
            title="CPU",
            text="CPU cores used by each process: 1 = one core all the time. The event loop is one thread.",
            unit="short",
            queries=(Query(f'rate(process_cpu_seconds_total{{job="{job}"}}[{RATE}])', "{{instance}}"),),
        ),
    )
