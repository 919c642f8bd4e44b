"""Settings of the scheduler service, read once by the composition root (`app`) and immutable afterwards."""

from pydantic import BaseModel, ConfigDict, Field

from svc_common.errors import ConfigError
from svc_common.net.names import DNS_SCHEME
from svc_common.net.tls_settings import PeerSettings


class SchedulerSettings(BaseModel):
    """What an operator can choose. vLLM's names where vLLM has the setting; durations in seconds.

    Limits that are None follow policy and worker (see `policy.assembly.policy_of`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    workers: tuple[str, ...] = ()
    """Worker addresses, HOST:PORT; policies with ranks have one for each. dns:///NAME:PORT: a worker at each of its addresses."""
    host: str = "127.0.0.1"
    port: int = Field(default=50060, ge=0, le=65535)
    admin_port: int = Field(default=50062, ge=0, le=65535)
    metrics_port: int = Field(default=8002, ge=0, le=65535)
    reflection: bool = True
    """Offer gRPC server reflection."""

    policy: str = "quire"
    """A preset's name or a policy file."""
    policy_set: tuple[str, ...] = ()
    """ "KEY=VALUE" on top of it."""
    max_num_seqs: int | None = Field(default=None, ge=1, le=65536)
    """Maximum number of sequences per step. Default: 256, or the tokens per step if that is less."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1, le=2**24)
    """Maximum number of tokens per step; policies with chunked prefill split longer prompts. Default: 2048; vllm-v0-chunked 512;
    policies with whole prompts: at least --max-model-len."""
    enable_prefix_caching: bool | None = None
    """Reuse KV blocks of equal prefixes. Default: yes."""
    overlap: bool | None = None
    """Plan the next step while one runs; policies quire and vllm-v1-async. Default: yes, except with CPU workers."""
    grants: bool = True
    """Let the worker repeat decode steps while nothing else is to be planned. Without effect where plans overlap, and under
    policies without fast decode."""
    adapters: tuple[str, ...] = ()
    """ "NAME=PATH" of LoRA adapters that workers load when they connect; PATH is a path on the worker's machine."""
    kv_events: bool = False
    """Tell routers that subscribe which KV blocks are cached, with their tokens."""
    num_gpu_blocks: int | None = Field(default=None, ge=2)
    """Number of KV blocks to use; at most as many as a worker has. Default: all."""
    num_cpu_blocks: int | None = Field(default=None, ge=0)
    """Number of KV blocks in host memory to use. Default: all."""

    max_waiting_requests: int = Field(default=4096, ge=1)
    """Maximum number of requests that wait for their first step; further ones are refused with a retry time."""
    max_waiting_tokens: int = Field(default=4_000_000, ge=1)
    """Maximum number of prompt tokens of these requests together."""
    max_waiting_s: float | None = Field(default=None, gt=0)
    """Maximum expected waiting time, in seconds at the rate at which the queue drains; requests beyond it are refused.
    Default: no limit."""
    max_live_requests: int = Field(default=65_536, ge=1)
    """Maximum number of requests, waiting or running; further ones are refused with a retry time."""
    no_worker_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds for which requests survive the loss of the last worker; then they end with UNAVAILABLE."""
    frontend_grace_s: float = Field(default=10.0, ge=0)
    """Seconds for which a resumable request without a reader keeps running, and is kept after its end."""
    max_retained_tokens: int = Field(default=1_000_000, ge=0)
    """Tokens of ended resumable requests kept for readers that reconnect, over all requests."""
    max_stored_bytes: int = Field(default=256 * 2**20, ge=0)
    """Maximum size of all stored responses (/v1/responses), in bytes; without room the oldest of the tenant with the most bytes are
    dropped; 0 = store none."""
    stored_s: float = Field(default=86_400.0, gt=0)
    """Seconds for which a response is stored."""

    connect_timeout_s: float = Field(default=5.0, gt=0)
    """Seconds within which a worker has to answer the first calls of a connection."""
    worker_lookup_s: float = Field(default=1.0, gt=0)
    """Seconds between two lookups of the names of workers (dns:///NAME:PORT)."""
    reconnect_backoff_s: float = Field(default=0.5, gt=0)
    """Maximum pause between two attempts to reach a worker, in seconds."""
    step_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds after which a worker that has not answered a step counts as lost; longer if its steps are known to be long."""
    force_ownership: bool = False
    """Take workers from another scheduler at once, to replace a failed one. Default: wait until its lease ends."""
    max_worker_losses: int = Field(default=5, ge=1)
    """Number of worker losses after which a request that ran in all of them fails, as a possible cause."""

    max_logged_steps: int = Field(default=10_000, ge=1)
    """Steps kept for `quire steps`."""
    max_logged_events: int = Field(default=65_536, ge=1)
    """Decisions kept for `quire why`; a request makes about five."""
    record_segment_steps: int = Field(default=1_000, ge=0)
    """Steps per segment of the recording kept for `quire record`, for each MiB of the state that a segment begins with; the oldest
    whole segments are dropped; 0 = record nothing."""
    record_ring_bytes: int = Field(default=16 * 2**20, ge=0)
    """Maximum size of all complete segments, in compressed bytes; 0 = record nothing."""
    record_tokens: bool = False
    """Record real token ids. Default: recordings have other ids in their place, from which no text can be reconstructed."""
    integrity_check_every: int = Field(default=1_000, ge=0)
    """Steps between two consistency checks of a worker's block tables, several workers by turns; 0 = never."""
    stats_interval_s: float = Field(default=5.0, ge=0)
    """Seconds between two lines of statistics in the log, written only when something happened; 0 = never."""
    drain_s: float = Field(default=2.0, ge=0)
    """Seconds for which running requests may continue after a stop signal."""
    peers: PeerSettings = PeerSettings()
    """TLS towards gateways and workers, and the peers that may call."""

    def worker_addresses(self) -> tuple[str, ...]:
        """Addresses and names of the workers. Raises ConfigError for none, duplicates, and texts that are no address."""
        if not self.workers or len(set(self.workers)) < len(self.workers):
            problem = "a worker is given twice" if self.workers else "no worker is given"
            raise ConfigError(
                f"{problem}; give --worker HOST:PORT once for each",
                reason="NUM_WORKERS",
                metadata={"workers": ",".join(self.workers)},
            )
        for address in self.workers:
            host, _, port = address.removeprefix(DNS_SCHEME).rpartition(":")
            if not host or not port.isdigit():
                raise ConfigError(
                    f"--worker {address!r} is no address; write HOST:PORT, for example 127.0.0.1:50061, or dns:///NAME:PORT",
                    reason="WORKER_ADDRESS",
                )
        return self.workers
