"""One comparison from plan to result: checkpoint, limits, references, rounds, limits again."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import filterfalse
from pathlib import Path
from typing import Any

from benchmarks.compare import checkpoints, figures, limits, shapes, workloads
from benchmarks.compare.engines import registry
from benchmarks.compare.engines.base import Engine, Form, Host
from benchmarks.compare.engines.environments import ROOT
from benchmarks.compare.rounds import References, Rounds, Say, references
from benchmarks.compare.shapes import ModelShape
from benchmarks.compare.workloads import Lengths, Workload

CAPACITY_SHARE = 0.65
OPEN, CAPACITY_OF = "W5", "W2"


@dataclass(slots=True)
class Plan:
    """Settings of a comparison.

    `lengths`: of the chosen workloads, by name; a rate of 0 for W5 = a share of the measured capacity.
    `num_checked`: requests of each run with tokens compared to those of the request alone. `read_mib`,
    `gemm_size`: sizes used to measure the limits.
    """

    model: str
    seed: int
    num_rounds: int
    lengths: dict[str, Lengths]
    engines: Sequence[str]
    cache: Path
    threads: int
    max_num_seqs: int = 64
    kv_gib: int = 2
    num_checked: int = 2
    fresh: bool = False
    quire_options: str = ""
    variants: Mapping[str, str] = field(default_factory=dict)
    read_mib: int = 512
    gemm_size: int = 2048
    peers: Path = ROOT / ".venv" / "peers"

    @property
    def shape(self) -> ModelShape:
        """Shape of its model."""
        return shapes.parse(self.model)[1]

    def draw(self, name: str, round_: int) -> Workload:
        """See workloads.drawn."""
        return workloads.drawn(
            name, self.lengths[name], seed=self.seed, round_=round_, vocab_size=self.shape.vocab_size
        )

    def host(self) -> Host:
        """Settings for the engines; makes the checkpoint if it does not exist."""
        return Host(
            checkpoint=checkpoints.made(self.model, self.seed, self.cache),
            threads=self.threads,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.shape.max_positions,
            kv_gib=self.kv_gib,
            peers=self.peers,
            logs=self.cache / "logs",
        )


def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Run the plan; the result has no provenance.

    Raises KeyError for an unknown engine, RuntimeError if something that all engines need failed.
    """
    host = plan.host()
    every = registry.engines(host, plan.shape, plan.variants, plan.quire_options)
    engines = registry.chosen(every, plan.engines, say)
    say("measuring the limits")
    first = _rates(plan)
    alone = _references(plan, host, engines, say)
    with Rounds(engines, say, fresh=plan.fresh) as rounds:
        if OPEN in plan.lengths and not plan.lengths[OPEN].rate:
            plan.lengths[OPEN] = workloads.at_rate(plan.lengths[OPEN], _rate(plan, rounds, engines))
        rounds.run(list(plan.lengths), plan.draw, plan.num_rounds, alone)
        facts = {standing.engine.name: standing.facts() for standing in rounds.standings}
    say("measuring the limits again")
    return _result(plan, rounds, facts, [first, _rates(plan)])


def _rates(plan: Plan) -> limits.Rates:
    return limits.read_rates(plan.read_mib, plan.gemm_size, plan.threads)


def _references(plan: Plan, host: Host, engines: Sequence[Engine], say: Say) -> References:
    if not plan.num_checked or not any(registry.is_quire(engine.name) for engine in engines):
        return {}
    say(f"computing {plan.num_checked} requests of each workload and round alone")
    engine = registry.reference(host, plan.shape)
    try:
        engine.start()
        return references(engine.alone, list(plan.lengths), plan.draw, plan.num_rounds, plan.num_checked)
    finally:
        engine.stop()


def _rate(plan: Plan, rounds: Rounds, engines: Sequence[Engine]) -> float:
    """A share of the capacity of the first peer that is a server (else of Quire), so that both can keep up.

    Raises RuntimeError if no server completes any request.
    """
    servers = [engine.name for engine in engines if engine.form is Form.SERVER]
    at_once = workloads.at_rate(plan.lengths[OPEN], 0.0)
    drawn = workloads.drawn(CAPACITY_OF, at_once, seed=plan.seed, round_=-1, vocab_size=plan.shape.vocab_size)
    for name in [*filterfalse(registry.is_quire, servers), *filter(registry.is_quire, servers)]:
        if found := rounds.capacity(name, drawn):
            return CAPACITY_SHARE * found
    raise RuntimeError("no server completed a request of W5, so its rate is unknown; give --set W5.rate=")


def _result(plan: Plan, rounds: Rounds, facts: Mapping[str, Any], readings: Sequence[limits.Rates]) -> dict[str, Any]:
    rates = limits.best(readings)
    ours = next((name for name in facts if registry.is_quire(name)), "")
    most = {name: limits.limit_tokens_per_s(plan.draw(name, 0), plan.shape, rates) for name in plan.lengths}
    return {
        "benchmark": "compare",
        "model": plan.model,
        "shape": shapes.described(plan.shape),
        "seed": plan.seed,
        "rounds": plan.num_rounds,
        "settings": {"threads": plan.threads, "max_num_seqs": plan.max_num_seqs, "kv_gib": plan.kv_gib},
        "workloads": {name: asdict(lengths) for name, lengths in plan.lengths.items()},
        "limits": {"readings": [asdict(one) for one in readings], "best": asdict(rates), "tokens_per_s": most},
        "engines": dict(facts),
        "ours": ours,
        "runs": rounds.rows,
        "ratios": figures.ratio_table(rounds.rows, ours),
        "tokens": {"checked": rounds.num_checked, "different": rounds.differences},
    }
