"""Scenarios through the real wire: rows, leases and messages as in the services, judged by the same outside checker."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from quire_tools.simulated_worker.bundle import END_OF_TEXT
from quire_tools.simulated_worker.settings import SimulatedWorkerSettings
from quire_tools.simulation.arrivals import Arrival
from quire_tools.simulation.faults import Faults
from quire_tools.simulation.history import SimulationHistory
from quire_tools.simulation.simulation import Simulation
from scheduler_svc.core.composition import presets
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import StopRules
from scheduler_svc.observe.run_observer import RunObserver
from scheduler_svc.worker_values import RowSampling
from svc_common.errors import ConfigError
from tests.simulation.checker import Streams, judge
from tests.simulation.runs import Verdict, counts_of, promise, what_is_left
from tests.simulation.scenarios import Scenario, scenario, setting_for
from tests.simulation.transcript import Complained, Got, Transcript
from tests.simulation.wire_link import WireLink
from tests.support.core.random_policies import Setting

SERVED_DEPTH = 2
_ATTEMPTS = 200


def run_wire(seed: int, policy: str | None = None, *, depth: int = SERVED_DEPTH) -> Verdict:
    """Scenario number `seed` with real messages; `depth`: plans that the shell has in flight, by default as the service."""
    given = wire_scenario(seed, policy)
    transcript, history = live_wire(given, wire_arrivals(given), depth)
    violations = judge(transcript.facts, promise(given, expected_wire(given)))
    return Verdict(given, transcript.digest, violations, counts_of(transcript, history, violations), transcript.facts)


def wire_scenario(seed: int, policy: str | None = None) -> Scenario:
    """What one worker's rows can express: single samples, no guesses, blocks; else as any scenario."""
    given = scenario(seed, policy)
    rng = random.Random(f"wire {seed}")
    setting = given.setting
    for _ in range(_ATTEMPTS):
        try:
            plain = as_served(setting)
            presets.build(plain.spec, plain.limits)
        except ConfigError:
            setting = setting_for(policy or rng.choice(presets.policy_names()), rng)
            continue
        if plain.spec.cache != "none" and plain.spec.phases != "ranks":
            return replace(given, setting=plain, faults=replace(given.faults, row_failure=0.0))
        setting = setting_for(policy or rng.choice(presets.policy_names()), rng)
    raise AssertionError(f"no setting for wire scenario {seed} under {policy}")


def as_served(setting: Setting) -> Setting:
    """The same without what the wire has no words for."""
    spec = replace(
        setting.spec,
        num_spec_tokens=0,
        num_scheduler_steps=1,
        num_lookahead_slots=0,
        sliding_window=None,
        max_loras=None,
    )
    v0 = spec.progress == "after_result"
    return Setting(spec, replace(setting.limits, prefix_caching=setting.limits.prefix_caching and not v0))


def wire_arrivals(given: Scenario) -> list[Arrival]:
    """The scenario's requests with one sample each; the model's end of text is the wire's."""
    return [replace(arrival, request=_single(arrival.request)) for arrival in given.arrivals()]


def _single(request: Request) -> Request:
    stop = request.stop
    eos = frozenset([END_OF_TEXT])
    rules = StopRules(stop.max_tokens, stop.min_tokens, ignore_eos=stop.ignore_eos, eos_token_ids=eos)
    return Request(
        request.request_id,
        request.prompt_token_ids,
        rules,
        request.arrival_time,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def live_wire(
    given: Scenario, arrivals: Sequence[Arrival], depth: int, *observers: RunObserver
) -> tuple[Transcript, SimulationHistory]:
    """One run with at most `depth` plans in flight."""
    setting, limits, transcript = given.setting, given.setting.limits, Transcript()
    core = presets.build(setting.spec, limits)
    worker = SimulatedWorkerSettings(
        block_size=limits.block_size,
        num_gpu_blocks=limits.num_gpu_blocks,
        num_cpu_blocks=limits.num_cpu_blocks,
        max_model_len=limits.max_model_len,
        eos_probability=0.04,
        time_scale=0.0,
    )
    complaints: list[str] = []
    simulation = Simulation(
        core,
        arrivals,
        given.tokens(),
        given.cost,
        seed=given.seed,
        faults=given.faults,
        max_in_flight=depth,
        observers=[transcript, *observers],
        connect=partial(WireLink, worker, limits.max_num_seqs, _sampling, complaints.append),
    )
    history = simulation.run()
    transcript.facts += [Complained(history.end_s, what) for what in complaints]
    transcript.facts.append(what_is_left(core, history, simulation.num_rows))
    return transcript, history


def _sampling(request_id: str) -> RowSampling:
    """Half of them greedy."""
    return RowSampling(temperature=float(len(request_id) % 2), top_p=1.0, top_k=0, seed=len(request_id))


def expected_wire(given: Scenario) -> Streams:
    """Every request alone, undisturbed; one that never ends by itself gets all the tokens that it asks for."""
    model_len = given.setting.limits.max_model_len + 8
    limits = replace(given.setting.limits, num_gpu_blocks=1_024, max_model_len=model_len, max_num_batched_tokens=1_024)
    calm = replace(given, setting=Setting(presets.preset("vllm-v1"), limits), faults=Faults())
    spread = [
        replace(arrival, at_s=1_000.0 * number, leaves_at_s=None, stop_string_at=None, deadline_s=None)
        for number, arrival in enumerate(wire_arrivals(given))
    ]
    transcript, _ = live_wire(calm, spread, depth=1)
    streams: dict[str, tuple[int, ...]] = {}
    for fact in transcript.facts:
        if isinstance(fact, Got):
            streams[fact.name] = (*streams.get(fact.name, ()), *fact.tokens)
    return streams
