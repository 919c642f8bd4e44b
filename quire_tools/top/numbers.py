"""The numbers that `quire top` shows. Pure.

Made from the scheduler's answers, drawn by quire_tools.top.drawing, printed by `--json`.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gateway_svc.lab import translation
from gateway_svc.lab.source import Listed
from protos.inference.v1 import admin_pb2
from quire_tools.top.steps import StepFigures
from quire_tools.top.words import sentence

WAITING_QUEUES = ("waiting", "swapped")
_NS_PER_MS, _MS_PER_S = 1e6, 1e3
_NUM_REMEMBERED = 2_000


@dataclass(frozen=True, slots=True)
class Answers:
    """A scheduler's answers at `at_ns` (Unix)."""

    at_ns: int
    load: admin_pb2.GetLoadResponse
    requests: admin_pb2.ListRequestsResponse
    workers: Sequence[admin_pb2.Worker]


@dataclass(frozen=True, slots=True)
class PoolNumbers:
    """Blocks of one pool: `used` by requests, `cached` = unreferenced with a reusable prefix, `free` = empty."""

    tier: str
    total: int
    used: int
    cached: int
    free: int


@dataclass(frozen=True, slots=True)
class WaitNumbers:
    """Requests of one queue that wait for the same reason. `words`: the reason in words."""

    queue: str
    reason: str
    num_requests: int
    words: str


@dataclass(frozen=True, slots=True)
class RequestRow:
    """An unfinished request. `age_s`: since arrival; `waited_s`: until first scheduled, or until now."""

    id: str
    request_id: str
    tenant: str
    queue: str
    reason: str
    numbers: dict[str, Any]
    priority: int
    prompt_tokens: int
    output_tokens: int
    cached_prompt_tokens: int
    num_choices: int
    num_preemptions: int
    age_s: float
    waited_s: float

    @property
    def is_waiting(self) -> bool:
        """True if the request is in a waiting queue."""
        return self.queue in WAITING_QUEUES


@dataclass(frozen=True, slots=True)
class TenantNumbers:
    """Load of one tenant; `name` empty = the default tenant."""

    name: str
    waiting: int
    running: int


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker. `problem`: why it runs no steps yet; empty = it is ready."""

    lane: int
    address: str
    ready: bool
    problem: str
    model: str
    epoch: int
    num_gpu_blocks: int


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Prompt tokens of requests seen since they started, and how many of them were prefix-cache hits."""

    num_requests: int
    prompt_tokens: int
    cached_tokens: int

    @property
    def hit_rate(self) -> float | None:
        """Share of cached prompt tokens; None without any tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


@dataclass(frozen=True, slots=True)
class TopNumbers:
    """A snapshot of a scheduler. `waits`: most frequent reason first. `pools`: empty until a worker has reported its blocks.

    `requests`: in order of arrival; `num_left_out` more are not listed. `output_tokens_per_s`: as counted
    by the scheduler. Fields are None if a recording does not contain them.
    """

    at_ns: int
    serving: bool
    draining: bool
    policy: str
    step: int
    waiting: int
    running: int
    swapped: int
    never_scheduled: int
    max_waiting: int | None
    waiting_tokens: int
    output_tokens_per_s: float
    starts_per_s: float | None
    waits: tuple[WaitNumbers, ...]
    pools: tuple[PoolNumbers, ...]
    prefixes: Prefixes
    steps: StepFigures
    workers: tuple[WorkerRow, ...]
    tenants: tuple[TenantNumbers, ...]
    requests: tuple[RequestRow, ...]
    num_left_out: int


class PrefixTally:
    """Prefix-cache hits of the most recent requests seen after their start."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def take(self, requests: Iterable[admin_pb2.LiveRequest]) -> None:
        """Count each started request once, by its id."""
        for request in requests:
            if request.HasField("started_ns"):
                self._seen[request.id] = (request.prompt_tokens, request.cached_prompt_tokens)
                self._seen.move_to_end(request.id)
        while len(self._seen) > _NUM_REMEMBERED:
            self._seen.popitem(last=False)

    def forget(self) -> None:
        """Reset, before requests of another scheduler."""
        self._seen.clear()

    def prefixes(self) -> Prefixes:
        """Totals over the requests remembered."""
        prompt, cached = (sum(pair[i] for pair in self._seen.values()) for i in (0, 1))
        return Prefixes(len(self._seen), prompt, cached)


def numbers_of(answers: Answers, steps: StepFigures, prefixes: Prefixes, policy: str) -> TopNumbers:
    """Combine answers and figures to TopNumbers."""
    load = answers.load
    now_ms = answers.at_ns / _NS_PER_MS
    rows = tuple(row_of(translation.listed(request), now_ms) for request in answers.requests.requests)
    return TopNumbers(
        at_ns=answers.at_ns,
        serving=load.serving,
        draining=load.draining,
        policy=policy,
        step=max(answers.requests.step, steps.last_step),
        waiting=load.queues.waiting,
        running=load.queues.running,
        swapped=load.queues.swapped,
        never_scheduled=load.num_waiting,
        max_waiting=load.max_waiting,
        waiting_tokens=load.num_waiting_tokens,
        output_tokens_per_s=load.output_tokens_per_s,
        starts_per_s=load.starts_per_s,
        waits=waits_of(((r.queue, r.reason, r.num_requests) for r in answers.requests.reasons), rows),
        pools=tuple(_pools(load)),
        prefixes=prefixes,
        steps=steps,
        workers=tuple(_worker(worker) for worker in answers.workers),
        tenants=tuple(TenantNumbers(t.tenant, t.num_waiting, t.num_running) for t in load.tenants),
        requests=rows,
        num_left_out=answers.requests.num_left_out,
    )


def numbers_json(numbers: TopNumbers) -> dict[str, Any]:
    """One JSON object with the fields by name."""
    values = asdict(numbers)
    values["prefixes"]["hit_rate"] = numbers.prefixes.hit_rate
    return values


def waits_of(counts: Iterable[tuple[str, str, int]], rows: Iterable[RequestRow]) -> tuple[WaitNumbers, ...]:
    """The waiting entries of `counts` (queue, reason, requests), most frequent first.

    Each is explained with an example from `rows`.
    """
    examples: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        examples.setdefault((row.queue, row.reason), row.numbers)
    found = [
        WaitNumbers(queue, reason, count, sentence(reason, examples.get((queue, reason), {})))
        for queue, reason, count in counts
        if queue in WAITING_QUEUES
    ]
    return tuple(sorted(found, key=lambda wait: (-wait.num_requests, wait.reason, wait.queue)))


def _pools(load: admin_pb2.GetLoadResponse) -> Iterable[PoolNumbers]:
    for tier, pool, known in (("device", load.gpu, load.HasField("gpu")), ("host", load.cpu, load.HasField("cpu"))):
        if known:
            yield PoolNumbers(tier, pool.total, pool.total - pool.free, pool.cached, pool.free - pool.cached)


def _worker(worker: admin_pb2.Worker) -> WorkerRow:
    problem = "" if worker.ready else worker.reason or "not reached yet"
    if problem and worker.warming:
        problem = f"warming up: {problem}"
    return WorkerRow(
        worker.lane, worker.address, worker.ready, problem, worker.model, worker.epoch, worker.num_gpu_blocks
    )


def row_of(request: Listed, now_ms: float) -> RequestRow:
    """The row of a request at `now_ms` on its source's clock."""
    started_ms = now_ms if request.started_ms is None else request.started_ms
    return RequestRow(
        id=request.id,
        request_id=request.request_id,
        tenant=request.tenant,
        queue=request.queue,
        reason=request.reason,
        numbers=request.numbers,
        priority=request.priority,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        cached_prompt_tokens=request.cached_prompt_tokens,
        num_choices=request.num_choices,
        num_preemptions=request.num_preemptions,
        age_s=_seconds(request.arrived_ms, now_ms),
        waited_s=_seconds(request.arrived_ms, started_ms),
    )


def _seconds(from_ms: float, to_ms: float) -> float:
    """Seconds from one time to the other, at least 0 even if the clocks of two machines differ."""
    return round(max(0.0, to_ms - from_ms) / _MS_PER_S, 3)
