"""Runs a scenario and has it judged from outside."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from quire_tools.simulation.arrivals import Arrival
from quire_tools.simulation.history import SimulationHistory
from quire_tools.simulation.simulation import Simulation
from quire_tools.simulation.token_model import TokenModel
from scheduler_svc.core.composition import presets
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.spec.policy_spec import PolicySpec
from scheduler_svc.observe.run_observer import RunObserver
from tests.simulation.checker import Promise, Streams, judge
from tests.simulation.checking_worker import BlockMemory, CheckingWorker, UncountedMemory
from tests.simulation.scenarios import Scenario, undisturbed
from tests.simulation.transcript import Complained, Fact, Got, Left, LostWorker, Planned, Transcript
from tests.support.core.random_policies import Setting


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a scenario. `counts`: how often what happened, for the report of sizes."""

    scenario: Scenario
    digest: str
    violations: list[str]
    counts: Counter[str] = field(default_factory=Counter)
    facts: Sequence[Fact] = ()


def run(scenario: Scenario) -> Verdict:
    """Runs it, judges it."""
    transcript, history = live(scenario, scenario.arrivals())
    violations = judge(transcript.facts, promise(scenario, expected_streams(scenario)))
    return Verdict(
        scenario, transcript.digest, violations, counts_of(transcript, history, violations), transcript.facts
    )


def counts_of(transcript: Transcript, history: SimulationHistory, violations: list[str]) -> Counter[str]:
    """How often what happened."""
    counts = Counter(
        scenarios=1,
        requests=len(history.requests),
        steps=sum(isinstance(fact, Planned) for fact in transcript.facts),
        tokens=sum(len(fact.tokens) for fact in transcript.facts if isinstance(fact, Got)),
        preemptions=sum(r.num_preemptions for r in history.requests.values()),
        workers_lost=sum(isinstance(fact, LostWorker) for fact in transcript.facts),
        repeated_results=history.num_repeated_results,
        violations=len(violations),
    )
    counts.update(f"end: {r.end}" for r in history.requests.values())
    return counts


def live(
    scenario: Scenario, arrivals: Sequence[Arrival], *observers: RunObserver, max_in_flight: int | None = None
) -> tuple[Transcript, SimulationHistory]:
    """One run with a worker that looks at what its blocks hold."""
    setting, tokens = scenario.setting, scenario.tokens()
    core = presets.build(setting.spec, setting.limits, pools=setting.pools)
    transcript = Transcript()
    simulation = Simulation(
        core,
        arrivals,
        tokens,
        scenario.cost,
        seed=scenario.seed,
        faults=scenario.faults,
        faults_of=scenario.faults_of,
        worker_per_lane=setting.spec.phases == "ranks",
        max_in_flight=max_in_flight,
        observers=[transcript, *observers],
        new_worker=partial(_worker, setting, tokens, transcript.complained),
    )
    history = simulation.run()
    transcript.facts.append(what_is_left(core, history, simulation.num_rows))
    return transcript, history


def what_is_left(core: Scheduler, history: SimulationHistory, num_rows: int) -> Left:
    """The last fact of a run."""
    pool = core.pool_report()
    return Left(
        device_blocks=pool.gpu.total - pool.gpu.free,
        host_blocks=pool.cpu.total - pool.cpu.free,
        rows=num_rows,
        requests=core.num_unfinished_groups,
        has_stalled=history.has_stalled,
        violations=tuple(core.check_integrity()),
    )


def _worker(
    setting: Setting, tokens: TokenModel, complain: Callable[[str], None], requests: dict[str, Request]
) -> CheckingWorker:
    spec, limits = setting.spec, setting.limits
    return CheckingWorker(
        tokens,
        requests,
        UncountedMemory() if spec.cache == "none" else BlockMemory(limits.block_size),
        windows=setting.windows,
        block_size=limits.block_size,
        max_num_rows=limits.max_num_seqs,
        complain=complain,
    )


def promise(scenario: Scenario, streams: Streams) -> Promise:
    """What holds for a scenario."""
    spec, limits = scenario.setting.spec, scenario.setting.limits
    return Promise(
        undisturbed=streams,
        most_tokens=limits.max_num_batched_tokens,
        most_seqs=limits.max_num_seqs,
        most_len=limits.max_model_len,
        capacity=presets.build(spec, limits).state.cache.capacity_tokens,
        most_steps=most_steps(scenario),
        extra_for_groups=spec.phases == "decode_then_prefill",
        counts_shares=spec.phases == "mixed",
        kept_free=(_watermark(spec) + spec.num_lookahead_slots + spec.can_swap) * limits.block_size,
        most_at_once=limits.max_num_batched_tokens if spec.is_multi_step or not limits.chunked_prefill else 1_000_000,
        gives_up=spec.scheduler_type is not None and "_only" in spec.scheduler_type,
    )


def most_steps(scenario: Scenario) -> int:
    """More steps than any sensible order of this work takes, with all that is computed again."""
    requests = [arrival.request for arrival in scenario.arrivals()]
    return max(1, len(scenario.setting.pools)) * 200 + 30 * sum(
        r.num_samples * (r.stop.max_tokens + len(r.prompt_token_ids)) for r in requests
    )


def expected_streams(scenario: Scenario) -> dict[str, tuple[int, ...]]:
    """Tokens of every sequence where nothing disturbs anything: single ones as the model says, groups as they turn out alone."""
    model, streams = scenario.tokens(), dict[str, tuple[int, ...]]()
    wide = []
    for arrival in scenario.arrivals():
        request = arrival.request
        if request.beam is None and (request.num_samples == 1 or scenario.setting.spec.grouping == "sample"):
            for index in range(request.num_samples):
                tokens = (model.token(request.request_id, index, at) for at in range(request.stop.max_tokens))
                streams[f"{request.request_id}/{index}"] = tuple(tokens)
        else:
            wide.append(replace(arrival, leaves_at_s=None, stop_string_at=None, deadline_s=None))
    if wide:
        streams |= _alone(undisturbed(scenario), wide)
    return streams


def _alone(calm: Scenario, arrivals: list[Arrival]) -> dict[str, tuple[int, ...]]:
    """Each of the requests with the whole machine to itself."""
    spread = [replace(arrival, at_s=1_000.0 * number) for number, arrival in enumerate(arrivals)]
    transcript, _ = live(calm, spread)
    assert not [fact for fact in transcript.facts if isinstance(fact, Complained)]
    got: dict[str, list[int]] = {}
    for fact in transcript.facts:
        if isinstance(fact, Got):
            if fact.name not in got:
                got[fact.name] = got[fact.parent][: fact.offset] if fact.parent is not None else []
            got[fact.name] += fact.tokens
    return {name: tuple(tokens) for name, tokens in got.items()}


def _watermark(spec: PolicySpec) -> int:
    """Blocks that no prompt may ever take; Quire's own rules waive theirs where nothing runs."""
    return 0 if spec.cache == "quire" else spec.watermark_blocks or 0
