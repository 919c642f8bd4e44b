"""Settings of the scheduler service. Read once by the composition root (`app`), frozen afterwards."""

from pydantic import BaseModel, ConfigDict, Field

from scheduler_svc.policy_choice import PolicyChoice, Spelling, choose
from svc_common.errors import ConfigError


class SchedulerSettings(BaseModel):
    """What an operator can choose. vLLM's names where vLLM has the setting; durations in seconds.

    `workers`: addresses HOST:PORT; several for a policy that has a rank for each. `policy`: a preset's name or a policy file;
    `policy_set`: "KEY=VALUE" on top of it. Limits that are None follow policy and worker (see `policy_choice`). `num_gpu_blocks` /
    `num_cpu_blocks`: use fewer than the workers' profile says; None = what fits.
    `overlap`: plan the next step while one runs, where the policy can.
    `force_ownership`: take a worker from another scheduler at once instead of waiting for that one's lease.
    Waiting requests are bounded by number and by prompt tokens; what goes beyond is refused with a retry time.
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
