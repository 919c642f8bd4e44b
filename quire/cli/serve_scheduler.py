"""`quire serve scheduler`."""

from typing import Annotated

import typer

from quire.cli import options as o
from quire.cli import service
from quire.cli.groups import new_app
from quire.scheduling import scheduler_settings
from quire.settings import option_name
from quire.sizes import parse_size
from scheduler_svc import app as scheduler

app = new_app()


@app.command()
def serve_scheduler(
    worker: Annotated[list[str] | None, typer.Option(help="Address of a worker, HOST:PORT; repeatable.")] = None,
    host: o.Host = "127.0.0.1",
    port: o.Port = o.DEFAULT_SCHEDULER_PORT,
    admin_port: o.AdminPort = o.DEFAULT_SCHEDULER_ADMIN_PORT,
    policy: o.Policy = "quire",
    policy_set: o.PolicySet = None,
    max_num_seqs: o.MaxNumSeqs = None,
    max_num_batched_tokens: o.MaxNumBatchedTokens = None,
    enable_prefix_caching: o.EnablePrefixCaching = None,
    overlap: o.Overlap = True,
    adapter: o.Adapters = None,
    record_memory: o.RecordMemory = None,
    record_tokens: o.RecordTokens = False,
    logged_steps: o.LoggedSteps = 10_000,
    logged_events: o.LoggedEvents = 65_536,
    stop_with_stdin: o.StopWithStdin = False,
) -> None:
    """Start a scheduler: it owns every queue and every block table, and no tensor.

    It starts at once and queues requests while its worker loads; a worker that cannot be reached is tried again and named in the
    health of the service.

      [bold]quire serve scheduler --worker 127.0.0.1:50061[/bold]
      [bold]quire serve scheduler --policy vllm-v0 --set preemption_mode=swap --set delay_factor=0.5[/bold]
    """
    settings = scheduler_settings(
        option_name,
        workers=tuple(o.host_and_port(address, "--worker") for address in worker or [o.DEFAULT_WORKER]),
        host=host,
        port=port,
        admin_port=admin_port,
        policy=policy,
        policy_set=tuple(policy_set or ()),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
        overlap=overlap,
        adapters=tuple(adapter or ()),
        record_ring_bytes=None if record_memory is None else parse_size(record_memory, "--record-memory"),
        record_tokens=record_tokens,
        max_logged_steps=logged_steps,
        max_logged_events=logged_events,
    )
    service.run(
        scheduler.serve(settings, on_ready=lambda address, *_: service.announce("scheduler", address)),
        stop_with_stdin=stop_with_stdin,
    )
