"""What `quire up` is to start, and the command line of each service that follows from it.

Not here: the processes (`quire.local_stack.stack`).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from quire.built_in_model import default_model
from quire.local_stack.certificate_folder import CertificateFolder
from quire.local_stack.restarts import RestartRules
from quire.settings import option_name
from svc_common.errors import ConfigError
from svc_common.net.tls_settings import GATEWAY, SCHEDULER, WORKER
from svc_common.observability.log_format import LogFormat

if TYPE_CHECKING:
    from scheduler_svc.policy.choice import PolicyChoice

_SCHEDULING = {
    "--policy": "policy",
    "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens",
}
_WORKER = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """What to start. `model` None = the built-in one; `simulated` = the worker without a model.

    `workers`: how many of them, each of `tensor_parallel` x `pipeline_parallel` processes. Ports: 0 = any free one.
    `adapters`: folders of LoRA adapters to load at the start, by name. `policy`: a preset's name or a policy file;
    `policy_set`: "KEY=VALUE" on top of it; `max_num_seqs`, `max_num_batched_tokens`: None = what the policy says.
    `*_args`: further options of `quire serve worker | scheduler | gateway` as on the command line. `restart`: how and how often
    `LocalStack.revive` starts again what died.
    `tls`: folder of `quire certs`: mutual TLS on every hop. `tenants`: file of API keys and quotas. `insecure`: plain text may
    leave this machine, where `host` says so. `log_format`: of what the services write to standard error.
    """

    model: Path | str | None = None
    simulated: bool = False
    workers: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    host: str = "127.0.0.1"
    grpc_port: int = 0
    http_port: int = 0
    admin_port: int = 0
    admin_http_port: int = 0
    adapters: Mapping[str, str | Path] = field(default_factory=dict)
    policy: str | None = None
    policy_set: Sequence[str] = ()
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    tls: Path | str | None = None
    tenants: Path | str | None = None
    insecure: bool = False
    log_format: LogFormat = LogFormat.TEXT
    worker_args: Sequence[str] = ()
    scheduler_args: Sequence[str] = ()
    gateway_args: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    restart: RestartRules = field(default_factory=RestartRules)

    def commands(self, chosen: Mapping[str, int]) -> dict[str, list[str]]:
        """Arguments after `quire serve`, by service, with the ports `chosen` (see LocalStack)."""
        model = [] if self.simulated else ["--model", str(self.model or default_model())]
        worker = ["simulated-worker" if self.simulated else "worker", *model]
        port = {option: str(number) for option, number in chosen.items()}
        host = ["--host", self.host]
        workers = {name: port[f"{name} --port"] for name in self.worker_names}
        addresses = [part for number in workers.values() for part in ("--worker", f"{self.host}:{number}")]
        return {
            **{
                name: [
                    *(*worker, *host, "--port", number, "--metrics-port", port[f"{name} --metrics-port"]),
                    *(*self._rank_zero(name, port), *self._peer_args(WORKER), *self._log_args, *self.worker_args),
                ]
                for name, number in workers.items()
            },
            **{
                follower: [
                    *(*worker, *self._group_sizes, "--rank", str(rank)),
                    *("--leader", f"{self.host}:{port[f'{name} --group-port']}"),
                    *(*self._peer_args(WORKER), *self._log_args, *self.worker_args),
                ]
                for name in self.worker_names
                for rank, follower in enumerate(self.ranks_of(name)[1:], 1)
            },
            "scheduler": [
                # The workers belong to this stack alone, and a new scheduler starts only after the previous
                # one has ended.
                *("scheduler", *addresses, *host, "--force-ownership"),
                *("--port", port["scheduler --port"], "--admin-port", port["scheduler --admin-port"]),
                *("--metrics-port", port["scheduler --metrics-port"]),
                *self._peer_args(SCHEDULER),
                *self._policy_args,
                *(part for name, path in self.adapters.items() for part in ("--adapter", f"{name}={path}")),
                *self._log_args,
                *self._overlap_args,
                *self.scheduler_args,
            ],
            "gateway": [
                *("gateway", "--scheduler", f"{self.host}:{port['scheduler --port']}", *host),
                *("--port", port["--grpc-port"], "--http-port", port["--http-port"]),
                *("--admin-port", port["--admin-port"], "--admin-http-port", port["--admin-http-port"]),
                *(*self._peer_args(GATEWAY), *self._door_args),
                *self._log_args,
                *self.gateway_args,
            ],
        }

    @property
    def worker_names(self) -> list[str]:
        """Names of the worker services: "worker", "worker-2" and so on."""
        return [_WORKER, *(f"{_WORKER}-{number}" for number in range(2, self.workers + 1))]

    def ranks_of(self, name: str) -> list[str]:
        """Services of the worker that the service `name` is a rank of, rank 0 first; `name` alone if it is no worker."""
        worker = name.partition("-rank-")[0]
        count = self._num_ranks if worker in self.worker_names else 1
        return [worker, *(f"{worker}-rank-{rank}" for rank in range(1, count))]

    def _rank_zero(self, name: str, port: Mapping[str, str]) -> list[str]:
        return [*self._group_sizes, "--group-port", port[f"{name} --group-port"]] if self._num_ranks > 1 else []

    @property
    def _num_ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def check(self) -> None:
        """Raise ConfigError for options that exclude each other."""
        if self.pipeline_parallel > 1 and self.adapters:
            name, path = next(iter(self.adapters.items()))
            raise ConfigError(
                f"--pipeline-parallel {self.pipeline_parallel} excludes adapters, and --adapter is {name}={path}; use "
                "--tensor-parallel for them",
                reason="PIPELINE_PARALLEL",
            )

    @property
    def _overlap_args(self) -> list[str]:
        """Batches of different rows are sent ahead to stages, which compute them at the same time."""
        has_batches = self.pipeline_parallel > 1 and self.choice.spec.num_groups() > 1
        return ["--overlap"] if has_batches else []

    @property
    def _group_sizes(self) -> list[str]:
        sizes = {"--tensor-parallel": self.tensor_parallel, "--pipeline-parallel": self.pipeline_parallel}
        return [part for option, size in sizes.items() if size > 1 for part in (option, str(size))]

    @property
    def choice(self) -> "PolicyChoice":
        """The policy and its limits, as the scheduler will read them. Raises ConfigError for what cannot work."""
        # Imported here because the policies take a third of a second, in which the services start already.
        from quire.scheduling import scheduler_settings  # noqa: PLC0415
        from scheduler_svc.policy.assembly import policy_of  # noqa: PLC0415

        arguments = [*self._policy_args, *self.scheduler_args]
        given = {
            name: int(value) if value.isdecimal() else value
            for name, value in pairwise(arguments)
            if name in _SCHEDULING
        }
        settings = scheduler_settings(
            option_name,
            **{field: given.get(option) for option, field in _SCHEDULING.items()},
            policy_set=tuple(value for name, value in pairwise(arguments) if name == "--set"),
            enable_prefix_caching=False if "--no-enable-prefix-caching" in arguments else None,
            workers=tuple(self.worker_names),  # only their number matters; addresses are not known yet
        )
        return policy_of(settings, option_name)

    @property
    def certificates(self) -> CertificateFolder | None:
        """The certificate folder `tls`; None without TLS."""
        return None if self.tls is None else CertificateFolder(Path(self.tls).absolute())

    def _peer_args(self, role: str) -> list[str]:
        encrypted = [] if self.certificates is None else self.certificates.peer_arguments(role)
        return [*encrypted, "--insecure"] if self.insecure else encrypted

    @property
    def _door_args(self) -> list[str]:
        encrypted = [] if self.certificates is None else self.certificates.door_arguments()
        return encrypted if self.tenants is None else [*encrypted, "--tenants", str(self.tenants)]

    @property
    def _log_args(self) -> list[str]:
        return [] if self.log_format is LogFormat.TEXT else ["--log-format", self.log_format.value]

    @property
    def _policy_args(self) -> list[str]:
        """The scheduling fields as arguments."""
        named = {option: getattr(self, field) for option, field in _SCHEDULING.items()}
        single = [part for name, value in named.items() if value is not None for part in (name, str(value))]
        return [*single, *(part for text in self.policy_set for part in ("--set", text))]

    @property
    def wanted_ports(self) -> dict[str, int]:
        """Ports by the option that sets them."""
        public = {
            "--grpc-port": self.grpc_port,
            "--http-port": self.http_port,
            "--admin-port": self.admin_port,
            "--admin-http-port": self.admin_http_port,
        }
        doors = ("--port", "--metrics-port", *(("--group-port",) if self._num_ranks > 1 else ()))
        workers = {f"{name} {option}": 0 for name in self.worker_names for option in doors}
        return public | workers | {f"scheduler {option}": 0 for option in ("--port", "--admin-port", "--metrics-port")}
