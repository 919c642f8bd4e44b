"""The simulation itself: its times follow from the cost model, nothing else; it starts from any core; its figures add up."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from quire_tools.simulation.arrivals import Arrival
from quire_tools.simulation.cost_model import CostModel
from quire_tools.simulation.faults import Faults
from quire_tools.simulation.history import SimulationHistory
from quire_tools.simulation.simulation import Simulation
from quire_tools.simulation.token_model import EOS, PseudoTokens
from quire_tools.simulation.workloads import WORKLOADS, Workload
from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import StopRules
from scheduler_svc.core.scheduler import Scheduler

COST = CostModel(base_s=1.0, schedule_s=0.25, wire_s=0.125)
LIMITS = CoreLimits(block_size=4, num_gpu_blocks=65, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64)


class ListedTokens(PseudoTokens):
    """Given output tokens by request and sequence index. Behind the end of a list: EOS."""

    def __init__(self, tokens: Mapping[str, Sequence[Sequence[int]]]) -> None:
        super().__init__()
        self._tokens = tokens

    def token(self, request_id: str, index: int, offset: int, choice: int = 0) -> int:
        """See `TokenModel`; `choice` k of the first sequence is the start of sequence k."""
        streams = self._tokens[request_id]
        stream = streams[choice or index] if (choice or index) < len(streams) else ()
        return stream[offset] if offset < len(stream) else EOS


def core_of(policy: str = "vllm-v1", **limits: int) -> Scheduler:
    return presets.build(policy, replace(LIMITS, **limits))


def ask(name: str, at_s: float, num_prompt: int = 4, max_tokens: int = 3) -> Arrival:
    return Arrival(at_s, Request(name, list(range(100, 100 + num_prompt)), StopRules(max_tokens=max_tokens), at_s))


def test_the_plain_loop_waits_between_steps() -> None:
    """R147: result k before plan k+1, so each token takes planning, the step, and the way back."""
    history = Simulation(core_of(), [ask("r", 2.0)], PseudoTokens(), COST).run()
    r = history.requests["r"]
    assert list(r.token_times_s) == [2.0 + 1.375 * k for k in (1, 2, 3)]
    assert (r.ttft_s, r.tpot_s, r.end) == (1.375, 1.375, "length")
    assert list(history.steps.duration_s) == [1.0, 1.0, 1.0]


def test_asynchronous_plans_hide_the_way() -> None:
    """R147: with a plan in flight while another runs, the worker never waits."""
    history = Simulation(core_of("vllm-v1-async"), [ask("r", 0.0, max_tokens=5)], PseudoTokens(), COST).run()
    assert list(history.requests["r"].token_times_s) == [1.375 + k for k in range(5)]


def test_an_arrival_waits_for_the_step_in_flight() -> None:
    """Continuous batching: a request that arrives during a step is in the next one."""
    history = Simulation(core_of(), [ask("a", 0.0), ask("b", 0.5)], PseudoTokens(), COST).run()
    assert history.requests["b"].first_scheduled_s == 1.375
    assert history.requests["b"].first_token_s == 2.75


def test_planned_lengths_end_in_eos() -> None:
    """A sequence ends after as many tokens as were planned for it, at its stop rule."""
    arrival = Arrival(0.0, Request("r", [5], StopRules(max_tokens=9, eos_token_ids=frozenset([EOS])), 0.0))
    history = Simulation(core_of(), [arrival], PseudoTokens(0, {"r": 4}), COST).run()
    assert (len(history.requests["r"].token_times_s), history.requests["r"].end) == (4, "stop")


def test_recorded_tokens_come_back() -> None:
    """Tokens given by list are those that the core gets, and no others."""
    core = core_of()
    arrival = ask("r", 0.0, max_tokens=3)
    Simulation(core, [arrival], ListedTokens({"r": [[11, 12, 13]]}), COST).run()
    assert arrival.request.sequences[0].token_ids[4:] == [11, 12, 13]


def test_it_goes_on_from_a_core_with_requests() -> None:
    """What runs in the core at the start time goes on as if nothing had been; arrivals join."""
    asked = {"max_tokens": 6}
    whole = Simulation(core_of(), [ask("a", 0.0, **asked), ask("b", 4.5)], PseudoTokens(), COST).run()
    core = core_of()
    before = Simulation(core, [ask("a", 0.0, **asked)], PseudoTokens(), COST, until_s=4.0)
    early = before.run()
    assert early.figures().num_censored == 1
    [plan] = before.in_flight
    assert plan.step == 3
    rest = Simulation(core, [ask("b", 4.5)], PseudoTokens(), COST, start_s=2.75, in_flight=[plan]).run()
    tokens = [*early.requests["a"].token_times_s, *rest.requests["a"].token_times_s]
    assert tokens == list(whole.requests["a"].token_times_s)
    assert list(rest.requests["b"].token_times_s) == list(whole.requests["b"].token_times_s)


def test_recomputed_tokens_are_lost_ones() -> None:
    """R27: tokens computed once more after a preemption or a lost worker are counted as lost; without either none are."""
    arrivals = [ask(f"r{k}", 0.0, num_prompt=8, max_tokens=16) for k in range(4)]
    calm = Simulation(core_of(prefix_caching=False), arrivals, PseudoTokens(), COST).run().figures()
    assert (calm.num_lost_tokens, calm.num_preemptions) == (0, 0)
    assert calm.num_computed_tokens == 4 * (8 + 15)
    again = [ask(f"r{k}", 0.0, num_prompt=8, max_tokens=16) for k in range(4)]
    faults = Faults(kills=(5.0,), restart_s=1.0)
    hit = Simulation(core_of(prefix_caching=False), again, PseudoTokens(), COST, faults=faults).run().figures()
    assert hit.num_lost_tokens > 4 * 8
    assert hit.num_computed_tokens == calm.num_computed_tokens + hit.num_lost_tokens
    tight = core_of(num_gpu_blocks=13, prefix_caching=False)
    third = [ask(f"r{k}", 0.0, num_prompt=8, max_tokens=16) for k in range(4)]
    squeezed = Simulation(tight, third, PseudoTokens(), COST).run().figures()
    assert squeezed.num_preemptions > 0
    assert squeezed.num_computed_tokens == calm.num_computed_tokens + squeezed.num_lost_tokens


def test_a_stopped_clock_and_a_slow_worker() -> None:
    """Steps that start in a slow time take so many times longer."""
    faults = Faults(slow=((1.0, 2.0, 3.0),))
    history = Simulation(core_of(), [ask("r", 0.0)], PseudoTokens(), COST, faults=faults).run()
    assert list(history.steps.duration_s) == [1.0, 3.0, 1.0]


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_follow_from_their_seed(name: str) -> None:
    """The same seed gives the same jobs, in order of arrival, another seed others; prompts fit the model."""
    make = WORKLOADS[name]
    one, same, other = make(1, 60, 10.0), make(1, 60, 10.0), make(2, 60, 10.0)
    assert one == same
    assert one != other
    times = [job.at_s for job in one.jobs]
    assert times == sorted(times)
    assert all(len(job.prompt) + job.max_tokens < 8_192 and job.num_output_tokens <= job.max_tokens for job in one.jobs)


def varied_chat() -> Workload:
    """Conversations with priorities, tenants and deadlines drawn by the seed; each keeps its tenant, as its turns share blocks."""
    plain, rng, jobs = WORKLOADS["chat"](3, 80, 10.0), random.Random(3), []
    for job in plain.jobs:
        tenant = random.Random(job.request_id.rpartition("-")[0]).choice(("a", "b"))
        jobs.append(
            replace(job, tenant=tenant, priority=rng.choice((0, 1, 2)), deadline_after_s=rng.choice((None, 5.0)))
        )
    return replace(plain, jobs=jobs)


def test_priorities_tenants_and_deadlines() -> None:
    """They reach the core, and all requests end."""
    varied = varied_chat()
    assert varied == varied_chat()
    assert {job.priority for job in varied.jobs} == {0, 1, 2}
    of_session: dict[str, set[str]] = {}
    for job in varied.jobs:
        of_session.setdefault(job.request_id.rpartition("-")[0], set()).add(job.tenant)
    assert {len(tenants) for tenants in of_session.values()} == {1}
    assert set.union(*of_session.values()) == {"a", "b"}
    ends = Simulation(
        core_of(max_model_len=8_192, num_gpu_blocks=4_096), varied.arrivals(), varied.tokens(), COST
    ).run()
    assert {"deadline", "stop"} <= {r.end for r in ends.requests.values()}


@pytest.mark.parametrize("name", ["chat", "agents"])
def test_shared_history_is_found_in_the_cache(name: str) -> None:
    """R107: what a conversation or an agent said before is computed once."""
    history = serve(name, num_gpu_blocks=4_096, prefix_caching=True)
    without = serve(name, num_gpu_blocks=4_096, prefix_caching=False)
    assert all(r.end == "stop" for r in history.requests.values())
    assert history.figures().num_computed_tokens < 0.6 * without.figures().num_computed_tokens


def serve(name: str, **limits: int) -> SimulationHistory:
    workload = WORKLOADS[name](1, 20, 4.0)
    sizes = {"block_size": 16, "max_model_len": 8_192, "max_num_seqs": 64, "max_num_batched_tokens": 2_048}
    core = core_of("vllm-v1", **{**sizes, **limits})
    return Simulation(core, workload.arrivals(), workload.tokens(), CostModel(base_s=0.01)).run()
