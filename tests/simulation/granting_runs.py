"""Scenarios in which plans grant steps: long outputs, large blocks, few arrivals; and whatever goes wrong meanwhile."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire_tools.simulation.arrivals import Arrival
from quire_tools.simulation.faults import Faults
from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import StopRules
from scheduler_svc.observe.run_observer import RunObserver
from scheduler_svc.observe.step_record import StepOrigin
from tests.simulation.checker import judge
from tests.simulation.runs import expected_streams, live, promise
from tests.simulation.scenarios import COSTS, Scenario
from tests.simulation.wire_runs import expected_wire, live_wire, wire_arrivals
from tests.support.core.random_policies import Setting

MOST_GRANTED = 7


@dataclass(slots=True)
class GrantCounts(RunObserver):
    """Steps of the judged runs, those that were repeated by a grant, and plans after a revocation."""

    num_steps: int = 0
    num_repeats: int = 0
    num_revocations: int = 0

    def on_plan(self, plan: StepPlan, origin: StepOrigin) -> None:
        """Count it."""
        self.num_steps += not plan.is_empty
        self.num_repeats += plan.is_repeat
        self.num_revocations += plan.revoked is not None

    def __str__(self) -> str:
        return f"{self.num_steps} steps, {self.num_repeats} of them by grants, {self.num_revocations} revocations"


class GrantingScenario(Scenario):
    """A scenario whose requests want 10 to 60 tokens. Without `max_granted_steps` in its limits it is the same without grants."""

    def arrivals(self) -> list[Arrival]:
        """The requests, single samples, made anew."""
        rng, arrivals = random.Random(f"grants {self.seed}"), []
        for arrival in super().arrivals():
            given = arrival.request
            stop = StopRules(rng.randint(10, 60), ignore_eos=rng.random() < 0.7, eos_token_ids=given.stop.eos_token_ids)
            request = Request(given.request_id, given.prompt_token_ids, stop, given.arrival_time)
            stop_at = None if arrival.stop_string_at is None else 4 * arrival.stop_string_at
            arrivals.append(replace(arrival, request=request, stop_string_at=stop_at))
        return arrivals


def granting_scenario(seed: int, policy: str, *, most_granted: int = MOST_GRANTED) -> GrantingScenario:
    """Scenario number `seed` under a policy with fast decode; the pool of some is short of blocks at times."""
    rng = random.Random(f"granting {policy} {seed}")
    limits = CoreLimits(
        block_size=8,
        num_gpu_blocks=rng.choice([14, 25, 60]),
        num_cpu_blocks=rng.choice([0, 20]) if policy == "quire" else 0,
        max_model_len=90,
        max_num_seqs=rng.choice([1, 3, 6]),
        max_num_batched_tokens=rng.choice([16, 64]),
        prefix_caching=rng.random() < 0.6,
        max_granted_steps=most_granted,
    )
    cost, times, at_s = rng.choice(COSTS), list[float](), 0.0
    for _ in range(rng.randint(1, 8)):
        times.append(at_s)
        at_s += rng.expovariate(1 / (cost.base_s * rng.choice([0.0001, 8, 25])))
    faults = Faults.random(rng, at_s + 40 * cost.base_s) if rng.random() < 0.8 else Faults()
    return GrantingScenario(seed, Setting(presets.preset(policy), limits), cost, faults, tuple(times))


def violations_of(given: GrantingScenario, counts: GrantCounts) -> Sequence[str]:
    """What is wrong with the simulated run."""
    transcript, _ = live(given, given.arrivals(), counts, max_in_flight=1)
    return judge(transcript.facts, promise(given, expected_streams(given)))


def wire_violations_of(given: GrantingScenario, counts: GrantCounts) -> Sequence[str]:
    """What is wrong with the run through real messages, ownership and grants of the worker."""
    given = replace(given, faults=replace(given.faults, row_failure=0.0))
    transcript, _ = live_wire(given, wire_arrivals(given), 1, counts)
    return judge(transcript.facts, promise(given, expected_wire(given)))
