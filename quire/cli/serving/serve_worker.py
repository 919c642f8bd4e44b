"""`quire serve worker`. In a Kubernetes LeaderWorkerSet, with one pod for each rank, the pod says which rank it is."""

import os
from collections.abc import Mapping
from typing import Any

from quire import extras
from quire.cli.groups import new_app
from quire.cli.options import access as a
from quire.cli.options import common as o
from quire.cli.options import model as m
from quire.cli.options.gathering import gathers
from quire.cli.options.settings import options_of
from quire.cli.serving import worker_service
from quire.hub import checkpoint_folder
from svc_common.errors import ConfigError
from svc_common.net.tls_settings import PeerSettings
from svc_common.observability.log_format import LogFormat
from worker_svc import app as worker
from worker_svc.settings import DEFAULT_GROUP_PORT, WorkerSettings

app = new_app()

_LEADER, _SIZE, _INDEX = "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"

_limits = options_of(WorkerSettings, panels={"Times": ("owner_lease_s",), "Traces": ("step_span_interval",)})


@app.command()
@gathers(
    loading=m.loading,
    adapter_limits=m.adapter_limits,
    memory=m.memory,
    membership=m.membership,
    limits=_limits,
    peers=a.peer_settings,
)
def serve_worker(
    *,
    model: m.Model = None,
    revision: m.Revision = "",
    loading: dict[str, Any],
    adapter_limits: dict[str, Any],
    memory: dict[str, Any],
    membership: dict[str, Any],
    host: o.Host = "127.0.0.1",
    port: o.Port = o.DEFAULT_WORKER_PORT,
    metrics_port: o.MetricsPort = o.DEFAULT_WORKER_METRICS_PORT,
    log_format: o.LogForm = LogFormat.TEXT,
    stop_with_stdin: o.StopWithStdin = False,
    limits: dict[str, Any],
    peers: PeerSettings,
) -> None:
    """Start a worker: it loads a checkpoint, owns the KV cache and executes the scheduler's steps.

    [bold]quire serve worker --model models/tiny[/bold]
    [bold]quire serve worker --model ~/Qwen3-0.6B --dtype bfloat16 --kv-cache-memory 2GiB[/bold]
    [bold]quire serve worker --tensor-parallel 2[/bold]                                   rank 0 of two
    [bold]quire serve worker --tensor-parallel 2 --rank 1 --leader 10.0.0.4:50063[/bold]  the other one
    [bold]quire serve worker --pipeline-parallel 2[/bold]                                 rank 0 of two with half of the layers each

    In a Kubernetes LeaderWorkerSet, rank, leader and the number of ranks are those of the pod.
    """
    extras.require("quire serve worker", "worker")
    found = checkpoint_folder(model, revision)
    settings = WorkerSettings.of(
        model=found.path,
        host=host,
        port=port,
        metrics_port=metrics_port,
        peers=peers,
        **{"served_model_name": found.name}
        | loading
        | adapter_limits
        | memory
        | in_set(membership, os.environ)
        | limits,
    )
    worker_service.run(worker.serve, settings, stop_with_stdin=stop_with_stdin, log_form=log_format, rank=settings.rank)


def in_set(given: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """`given` settings of a group, with those of the pod for what is not given. Raises ConfigError for a wrong variable.

    Only where the pod has an index and no rank is given. Stages are never those of the pod.
    """
    if _INDEX not in environ or "rank" in given:
        return dict(given)
    size, rank = _number(environ, _SIZE, "1"), _number(environ, _INDEX, "0")
    port = given.get("group_port", DEFAULT_GROUP_PORT)
    stages = given.get("pipeline_parallel", 1)
    if size % stages:
        raise ConfigError(
            f"{_SIZE} is {size}, which --pipeline-parallel {stages} does not divide", reason="INVALID_SETTING"
        )
    found = {"tensor_parallel": size // stages, "rank": rank}
    if rank:
        if not environ.get(_LEADER):
            raise ConfigError(f"{_INDEX} is {rank}, but {_LEADER} is not set", reason="INVALID_SETTING")
        found["leader"] = f"{environ[_LEADER]}:{port}"
    return found | dict(given)


def _number(environ: Mapping[str, str], name: str, default: str) -> int:
    text = environ.get(name, default)
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}, which is no number", reason="INVALID_SETTING")
    return int(text)
