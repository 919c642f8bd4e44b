"""`python -m tests.metrics_page [--write]`: docs/metrics.md, made from the definitions that the services count by."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from gateway_svc import metric_definitions as gateway
from gateway_svc.cell import definitions as cell
from scheduler_svc.observe.metrics import definitions as scheduler
from svc_common.observability.metrics import MODEL_NAME, Kind, MetricSpec, new_registry
from worker_svc.shell import metric_definitions as worker

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "metrics.md"

SERVICES: Mapping[str, Sequence[MetricSpec]] = {
    "Gateway": (*gateway.METRICS, *cell.CELL_METRICS),
    "Scheduler": scheduler.METRICS,
    "Worker": worker.METRICS,
}
_WHERE: Mapping[str, str] = {
    "Gateway": "`/metrics` at the HTTP port (8000), no key needed, and at the admin HTTP port (`--admin-http-port`, 8001).",
    "Scheduler": "`/metrics` on `--metrics-port`, 8002.",
    "Worker": "`/metrics` on `--metrics-port`, 8003.",
}
_INTRODUCTION = """\
# Metrics and logs

This page lists the Prometheus metrics and the log lines of each service. It is made from the definitions in the code by
`python -m tests.metrics_page --write`.

Each service has Prometheus metrics of its own. `quire up` chooses free ports for scheduler and workers and prints them
(`metrics=`); a service that is started alone has the port given here, 0 = any free one. With certificates (`--peer-*`)
scheduler and worker answer any client with a certificate of the same CA, as health does; Prometheus' `tls_config` needs `ca_file`,
`cert_file`, `key_file` and `server_name: scheduler` (or `worker`). Without, plain text leaves the machine only with
`--insecure`. Everything beside `/metrics` is 404. A scrape reads what a service's event loop owns on that loop, some dozens of
requests at a time, so that a long queue does not hold a step up; the answer is written beside it.

No label has a value that a client wrote. Counters begin at 0 with the process; `rate` and `increase` know that. Histograms
have the series `_bucket`, `_sum` and `_count`.

Clients that ask for OpenMetrics (`Accept: application/openmetrics-text; version=1.0.0`, as Prometheus does with
`--enable-feature=exemplar-storage`) get exemplars too: the histograms of a request's times, at the gateway and
`quire_queue_time_seconds`, name the `trace_id` and `span_id` of one request in each bucket, of those whose
[trace](tracing.md) is recorded.
"""
_LOGS = """\
## The process

What Prometheus' client reads of the operating system, the same in each service.

{process}

## The scheduler's line of statistics

While anything happens, the scheduler's log has a line every `--stats-interval-s` seconds (5; 0 = never), with the numbers of
the metrics above: gauges as they stand, the difference of counters since the line before, quantiles of what the steps in
between took.

```
INFO quire.stats: 7 running, 1 waiting, 0 swapped; blocks 14.3 % of 4096 gpu, 0.0 % of 1024 cpu; prompt 36.1 tokens/s, output 2.4
tokens/s; prefix hits 70.3 %; 0 preempted; 12 steps, 2 with prompts, 47 tokens, p50 2.34 ms, p99 3.90 ms
```

It is one line; here it is folded. It is written at the default log level too; with `QUIRE_LOG_LEVEL=WARNING`, given, it is
not. Failed steps, if there were any, are at its end.

## Failed steps

A step that failed (a worker's error, a worker that was lost, output that is not finite) is in the scheduler's log once, with
what ran in it as `quire steps --decode` shows it, without tokens, and with the command that fetches its
[recording](recordings.md). Of many in a row five are told, then one in ten seconds and how many were not.

## JSON

`--log-format json`, of each service and of `quire up`, writes one object per line to standard error:

| field | |
|---|---|
| `time` | UTC, ISO 8601 with microseconds |
| `level`, `logger`, `message` | as in the text form |
| `service` | `gateway`, `scheduler`, `worker`; `up` for what `quire up` says itself |
| `trace_id`, `span_id` | of the request that the line is about, where its call came with a trace or is traced here |
| `request_id` | its id |
| `tenant` | its tenant, as a hash: BLAKE2b of its name to 6 bytes, in hex; not of the default tenant |
| `exception` | of bugs: types and places, without what exceptions say, as they may quote a prompt |

What is not known is left out. Each call at the gateway has a line at level `INFO`. A service that cannot start says why in a
plain last line, `error: ...`.
"""


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _entry(spec: MetricSpec) -> Iterator[str]:
    yield f"### {spec.name}\n"
    yield f"{spec.text}\n"
    yield "| | |\n|---|---|"
    yield f"| type | {spec.kind.value} |"
    yield f"| unit | {'a number' if spec.unit == '1' else spec.unit} |"
    if spec.of_model:
        yield f"| label `{MODEL_NAME}` | the model that is served; empty before the first is loaded |"
    for label, values in spec.labels.items():
        yield f"| label `{label}` | {_cell(values)} |"
    if spec.kind is Kind.HISTOGRAM:
        yield f"| buckets up to | {', '.join(f'{bound:.10g}' for bound in spec.buckets)} |"
    yield f"| counts | {_cell(spec.formula)} |"
    yield f"| serves | {_cell(spec.serves)} |"
    yield f"\n```promql\n{spec.query}\n```\n"


def _section(name: str, specs: Sequence[MetricSpec]) -> Iterator[str]:
    yield f"## {name}\n"
    yield f"{_WHERE[name]}\n"
    for spec in specs:
        yield from _entry(spec)


def _process(registry: CollectorRegistry) -> str:
    rows = [
        f"| `{_exposed(metric.name, metric.type)}` | {_cell(metric.documentation)} |" for metric in registry.collect()
    ]
    return "\n".join(["| metric | |\n|---|---|", *rows])


def _exposed(name: str, kind: str) -> str:
    return f"{name}_total" if kind == "counter" else name


def page() -> str:
    """The whole page."""
    lines = [_INTRODUCTION]
    for name, specs in SERVICES.items():
        lines += _section(name, specs)
    lines.append(_LOGS.format(process=_process(new_registry())))
    return "\n".join(lines)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/metrics.md; otherwise print it")
    made = page()
    if parser.parse_args().write:
        PAGE.write_text(made, encoding="utf-8")
    else:
        sys.stdout.write(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
