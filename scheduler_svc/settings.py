"""Settings of the scheduler service. Read once by the composition root (`app`), frozen afterwards."""

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, Field

from scheduler_svc.adapter_names import name_problem
from scheduler_svc.policy.assembly import choose
from scheduler_svc.policy.choice import PolicyChoice, Spelling
from svc_common.errors import ConfigError


class SchedulerSettings(BaseModel):
    """What an operator can choose. vLLM's names where vLLM has the setting; durations in seconds.

    `workers`: addresses HOST:PORT; several for a policy that has a rank for each. `policy`: a preset's name or a policy file;
    `policy_set`: "KEY=VALUE" on top of it. Limits that are None follow policy and worker (see `policy_choice`). `num_gpu_blocks` /
    `num_cpu_blocks`: use fewer than the workers' profile says; None = what fits.
    `overlap`: plan the next step while one runs, where the policy can.
    `adapters`: "NAME=PATH" of LoRA adapters that workers load when they come; PATH as they see it.
    `force_ownership`: take a worker from another scheduler at once instead of waiting for that one's lease.
    Waiting requests are bounded by number and by prompt tokens; what goes beyond is refused with a retry time.
    `max_logged_steps`, `max_logged_events`: what `quire steps` and `quire why` look back on.
    `record_*`: the last steps are kept for `quire record`, in segments of so many steps, as many as fit so many bytes (either 0 =
    none); with tokens under other names unless `record_tokens` says otherwise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    workers: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = Field(default=50060, ge=0, le=65535)
    admin_port: int = Field(default=50062, ge=0, le=65535)

    policy: str = "quire"
    policy_set: tuple[str, ...] = ()
    max_num_seqs: int | None = Field(default=None, ge=1, le=65536)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    enable_prefix_caching: bool | None = None
    overlap: bool = True
    adapters: tuple[str, ...] = ()
    num_gpu_blocks: int | None = Field(default=None, ge=2)
    num_cpu_blocks: int | None = Field(default=None, ge=0)

    max_waiting_requests: int = Field(default=4096, ge=1)
    max_waiting_tokens: int = Field(default=4_000_000, ge=1)
    no_worker_timeout_s: float = Field(default=30.0, gt=0)
    frontend_grace_s: float = Field(default=10.0, ge=0)
    max_retained_tokens: int = Field(default=1_000_000, ge=0)

    connect_timeout_s: float = Field(default=5.0, gt=0)
    reconnect_backoff_s: float = Field(default=2.0, gt=0)
    step_timeout_s: float = Field(default=30.0, gt=0)
    force_ownership: bool = False
    max_worker_losses: int = Field(default=5, ge=1)

    max_logged_steps: int = Field(default=10_000, ge=1)
    max_logged_events: int = Field(default=65_536, ge=1)
    record_segment_steps: int = Field(default=1_000, ge=0)
    record_ring_bytes: int = Field(default=64 * 2**20, ge=0)
    record_tokens: bool = False
    integrity_check_every: int = Field(default=1_000, ge=0)
    drain_s: float = Field(default=2.0, ge=0)

    def policy_choice(self, spelled: Spelling = str) -> PolicyChoice:
        """The policy with its limits; ConfigError, by the names of `spelled`, where they cannot work or cannot be served."""
        choice = choose(
            self.policy,
            self.policy_set,
            spelled=spelled,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefix_caching=self.enable_prefix_caching,
            num_gpu_blocks=self.num_gpu_blocks,
            num_cpu_blocks=self.num_cpu_blocks,
            num_workers=max(1, len(self.workers)),
        )
        choice.check()
        return choice

    def worker_addresses(self) -> tuple[str, ...]:
        """The workers to drive. ConfigError for none, the same twice, and what is no address."""
        if not self.workers or len(set(self.workers)) < len(self.workers):
            problem = "a worker is given twice" if self.workers else "no worker is given"
            raise ConfigError(
                f"{problem}; give --worker HOST:PORT once for each",
                reason="NUM_WORKERS",
                metadata={"workers": ",".join(self.workers)},
            )
        for address in self.workers:
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit():
                raise ConfigError(
                    f"--worker {address!r} is no address; write HOST:PORT, for example 127.0.0.1:50061",
                    reason="WORKER_ADDRESS",
                )
        return self.workers

    def adapter_paths(self) -> dict[str, str]:
        """Folders of `adapters` by name. ConfigError."""
        return adapter_paths(self.adapters)


def adapter_paths(texts: Iterable[str]) -> dict[str, str]:
    """Folders by name of "NAME=PATH" texts. ConfigError for what is none, names of no use, and the same name twice."""
    paths: dict[str, str] = {}
    for text in texts:
        name, _, path = text.partition("=")
        problem = name_problem(name) and f"its name {name_problem(name)}"
        problem = problem or ("" if path else "write NAME=PATH, for example sql=/adapters/sql")
        problem = problem or ("is given twice; choose another name for one of them" if name in paths else "")
        if problem:
            raise ConfigError(f"--adapter {text!r}: {problem}", reason="ADAPTER_OPTION", metadata={"adapter": name})
        paths[name] = path
    return paths
