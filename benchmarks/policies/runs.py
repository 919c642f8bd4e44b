"""Load of each workload, and serving one workload with one policy in virtual time."""

from dataclasses import dataclass, replace
from typing import Any

from quire_tools.simulation.cost_model import GPU, Fit
from quire_tools.simulation.history import Figures, SimulationHistory
from quire_tools.simulation.simulation import Simulation
from quire_tools.simulation.workloads import WORKLOADS, Workload
from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.scheduler import Scheduler
from svc_common.errors import ConfigError

MAX_MODEL_LEN = 8_192
BUDGET = 2_048


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a workload: close to the machine's capacity, with too few blocks for all requests. `rate`: requests/s."""

    rate: float
    num_gpu_blocks: int
    num_requests: int


LOADS = {
    "chat": Load(rate=12.0, num_gpu_blocks=1_600, num_requests=1_200),
    "long-prompts": Load(rate=9.5, num_gpu_blocks=2_000, num_requests=800),
    "bursts": Load(rate=12.0, num_gpu_blocks=1_200, num_requests=1_000),
    "agents": Load(rate=13.0, num_gpu_blocks=1_500, num_requests=1_000),
}


@dataclass(frozen=True, slots=True)
class Source:
    """Basis of predictions: a recording in `file` under `policy`, its own figures, and the cost model fitted to it."""

    file: str
    policy: str
    figures: Figures
    fit: Fit


@dataclass(slots=True)
class Comparison:
    """One workload under several policies, by name. `source`: None = simulated directly, with the cost model of `GPU`."""

    load: Load
    runs: dict[str, SimulationHistory]
    source: Source | None = None

    def figures(self) -> dict[str, Figures]:
        """Figures by policy."""
        return {name: history.figures() for name, history in self.runs.items()}


def make(kind: str, seed: int, num_requests: int = 0) -> tuple[Workload, Load]:
    """Make a workload of `LOADS`; `num_requests` 0: as many as its figures need."""
    load = replace(LOADS[kind], num_requests=num_requests or LOADS[kind].num_requests)
    return WORKLOADS[kind](seed, load.num_requests, load.rate), load


def serve(policy: str, workload: Workload, load: Load) -> SimulationHistory:
    """Serve one workload with one policy."""
    core = build(policy, load)
    core.observe_costs(GPU.costs)
    return simulate(core, workload).run()


def simulate(core: Any, workload: Workload, **parts: Any) -> Simulation:
    """A simulation of a core, recorded or not, that will serve a workload. `parts`: of `Simulation`."""
    return Simulation(core, workload.arrivals(), workload.tokens(), GPU, seed=workload.seed, **parts)


def build(policy: str, load: Load) -> Scheduler:
    """Build the preset with the common limits, or with a budget of whole prompts if it needs that."""
    limits = CoreLimits(
        block_size=16,
        num_gpu_blocks=load.num_gpu_blocks,
        num_cpu_blocks=load.num_gpu_blocks // 2,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=64,
        max_num_batched_tokens=BUDGET,
    )
    try:
        return presets.build(policy, limits)
    except ConfigError:
        return presets.build(policy, replace(limits, max_num_batched_tokens=MAX_MODEL_LEN))
