"""Runs of several worker groups in virtual time, and of routers in front of single ones.

The load of N workers is that of N independent crowds of users, each with the load of one worker. So what one scheduler with N
workers does is compared with what N schedulers with a worker each do for the same crowds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.policies.runs import BUDGET, LOADS, MAX_MODEL_LEN
from benchmarks.worker_groups.router import Router
from quire_tools.simulation.arrivals import Arrival
from quire_tools.simulation.cost_model import GPU, CostModel
from quire_tools.simulation.history import Figures, SimulationHistory
from quire_tools.simulation.simulation import Simulation
from quire_tools.simulation.token_model import PseudoTokens
from quire_tools.simulation.workloads import WORKLOADS, Job, Workload
from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits, PoolSize
from scheduler_svc.core.scheduler import Scheduler

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Placed:
    """Figures of one run. `hit_rate`: share of all prompt tokens that were cached when their request first started.

    `imbalance`: by how much the busiest worker computed longer than the mean.
    """

    figures: Figures
    hit_rate: float
    imbalance: float


class CrowdTokens:
    """Tokens of the requests of several crowds: those that each crowd's jobs have without the others. `jobs` by crowd."""

    def __init__(self, crowds: Sequence[Workload]) -> None:
        self._of: dict[str, tuple[PseudoTokens, str]] = {}
        for number, crowd in enumerate(crowds):
            tokens = crowd.tokens()
            self._of.update({_name(number, job): (tokens, job.request_id) for job in crowd.jobs})

    def token(self, request_id: str, index: int, offset: int, choice: int = 0) -> int:
        """See `TokenModel`."""
        tokens, name = self._of[request_id]
        return tokens.token(name, index, offset, choice)

    def guess(self, request_id: str, index: int, offset: int) -> int:
        """See `TokenModel`."""
        tokens, name = self._of[request_id]
        return tokens.guess(name, index, offset)

    def candidates(self, request_id: str, index: int, offset: int, width: int) -> list[tuple[int, float]]:
        """See `TokenModel`."""
        tokens, name = self._of[request_id]
        return tokens.candidates(name, index, offset, width)


@dataclass(frozen=True, slots=True)
class Load:
    """Jobs of one or more crowds, in order of arrival."""

    kind: str
    crowds: tuple[Workload, ...]

    @property
    def jobs(self) -> list[Job]:
        """All jobs, named by crowd."""
        named = [replace(job, request_id=_name(i, job)) for i, crowd in enumerate(self.crowds) for job in crowd.jobs]
        return sorted(named, key=lambda job: (job.at_s, job.request_id))

    @property
    def num_blocks(self) -> int:
        """Device blocks of one worker."""
        return LOADS[self.kind].num_gpu_blocks

    def run(self, core: Scheduler, jobs: Sequence[Job] | None = None, cost: CostModel = GPU) -> SimulationHistory:
        """Serve the jobs to the end; `jobs`: some of them."""
        arrivals: list[Arrival] = [job.arrival() for job in (self.jobs if jobs is None else jobs)]
        return Simulation(core, arrivals, CrowdTokens(self.crowds), cost).run()


def _name(crowd: int, job: Job) -> str:
    return f"{crowd}.{job.request_id}"


@cache
def load_of(kind: str, num_crowds: int, num_requests: int, seed: int = 1) -> Load:
    """So many crowds, with about `num_requests` requests each."""
    make, rate = WORKLOADS[kind], LOADS[kind].rate
    return Load(kind, tuple(make(seed + i, num_requests, rate) for i in range(num_crowds)))


def core_of(
    policy: str, num_blocks: int, num_workers: int, placement: str = "prefix_affinity", scale: int = 1
) -> Scheduler:
    """A core with so many workers of `num_blocks` device blocks. `scale`: of the machine that each is."""
    limits = CoreLimits(
        block_size=BLOCK_SIZE,
        num_gpu_blocks=num_blocks * scale,
        num_cpu_blocks=num_blocks * scale // 2,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=64 * scale,
        max_num_batched_tokens=MAX_MODEL_LEN if policy == "vllm-v0" else BUDGET * scale,
    )
    pools = [PoolSize(limits.num_gpu_blocks, limits.num_cpu_blocks)] * num_workers
    core = presets.build(policy, limits, pools=pools, placement=placement)
    core.observe_costs(GPU.costs)
    return core


def one_scheduler(policy: str, load: Load, placement: str = "prefix_affinity") -> Placed:
    """One queue over as many workers as there are crowds."""
    return placed([load.run(core_of(policy, load.num_blocks, len(load.crowds), placement))])


def apart(policy: str, load: Load) -> Placed:
    """Each crowd has a scheduler with one worker."""
    return placed(
        [Load(load.kind, (crowd,)).run(core_of(policy, load.num_blocks, 1)) for crowd in load.crowds], apart=True
    )


def one_big_pool(policy: str, load: Load) -> Placed:
    """One cache as large as those of all workers together, on a machine whose steps take as many tokens in the same time."""
    scale = len(load.crowds)
    cost = replace(GPU, **{name: getattr(GPU, name) / scale for name in _PER_TOKEN})
    return placed([load.run(core_of(policy, load.num_blocks, 1, scale=scale), cost=cost)])


def routed(policy: str, load: Load) -> Placed:
    """A router that knows the prompts that it has sent, in front of schedulers with one worker each."""
    num_workers = len(load.crowds)
    router = Router(num_workers, load.num_blocks * BLOCK_SIZE, BLOCK_SIZE)
    shares: list[list[Job]] = [[] for _ in range(num_workers)]
    for job in load.jobs:
        shares[router.worker_for(job)].append(job)
    return placed([load.run(core_of(policy, load.num_blocks, 1), share) for share in shares])


_PER_TOKEN = ("prefill_token_s", "decode_seq_s", "context_token_s", "pair_s")


def placed(histories: Sequence[SimulationHistory], *, apart: bool = False) -> Placed:
    """Figures of one history of several workers, or of one of each worker. `apart`: their requests have equal names."""
    requests = {
        f"{i}.{name}" if apart else name: request
        for i, history in enumerate(histories)
        for name, request in history.requests.items()
    }
    merged = SimulationHistory(requests, histories[0].steps)
    prompts = sum(len(r.request.prompt_token_ids) for r in requests.values())
    cached = sum(_num_cached(history) for history in histories)
    busy = _busy_s(histories)
    return Placed(merged.figures(), cached / prompts, max(busy) * len(busy) / math.fsum(busy) - 1.0)


def _num_cached(history: SimulationHistory) -> int:
    """Prompt tokens that were not computed. Under v0 cached blocks are scheduled, and save no budget."""
    return sum(
        len(r.request.prompt_token_ids) + len(r.token_times_s) - 1 - (r.num_computed_tokens - r.num_lost_tokens)
        for r in history.requests.values()
        if r.is_done
    )


def _busy_s(histories: Sequence[SimulationHistory]) -> list[float]:
    """Seconds that each worker computed."""
    if len(histories) > 1:
        return [sum(history.steps.duration_s) for history in histories]
    steps, busy = histories[0].steps, dict[int, float]()
    for lane, duration_s in zip(steps.lane, steps.duration_s, strict=True):
        busy[lane] = busy.get(lane, 0.0) + duration_s
    return list(busy.values())
