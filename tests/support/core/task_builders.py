"""Small cores that schedule tasks as Chitu does, and a loop whose results come when a test says so."""

from typing import Any

from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepOutcome, StepPlan, StepResult
from scheduler_svc.core.request import Group, Request
from scheduler_svc.core.request_rules import BeamRules, StopRules
from scheduler_svc.core.spec.policy_spec import knob_names

EOS = 0
Share = tuple[str, str, int, int]


class Tasks:
    """One core. `num_blocks` are usable ones; priorities are Chitu's: larger = sooner."""

    def __init__(self, preset: str = "chitu", *, num_blocks: int = 64, **given: Any) -> None:
        knobs = {name: value for name, value in given.items() if name in knob_names()}
        limits = {
            "block_size": 4,
            "num_gpu_blocks": num_blocks + 1,
            "max_model_len": 64,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 256,
            "prefix_caching": False,
            **{name: value for name, value in given.items() if name not in knob_names()},
        }
        self.core = presets.build(preset, CoreLimits(**limits), **knobs)
        self.now = 100.0
        self.plans: list[StepPlan] = []

    def add(
        self,
        name: str,
        num_tokens: int = 4,
        max_tokens: int = 8,
        *,
        arrival: float = 0.0,
        priority: int = 1,
        n: int = 1,
    ) -> None:
        """A task with a prompt of so many tokens."""
        self.core.add(self.request(name, num_tokens, max_tokens, arrival=arrival, priority=priority, n=n))

    def request(
        self,
        name: str,
        num_tokens: int,
        max_tokens: int = 8,
        *,
        arrival: float = 0.0,
        priority: int = 1,
        n: int = 1,
        beam: BeamRules | None = None,
        committed: tuple[int, ...] = (),
    ) -> Request:
        """Its request."""
        stop = StopRules(max_tokens=max_tokens, eos_token_ids=frozenset([EOS]))
        return Request(
            name, [7] * num_tokens, stop, arrival, priority=-priority, n=n, beam=beam, committed=list(committed)
        )

    def plan(self) -> list[Share]:
        """Plans; its shares, of all ranks one behind the other, as (id, "P" or "D", start, tokens)."""
        self.plans = self.core.schedule(self.now)
        self.now += 1.0
        return [share for plan in self.plans for share in shares(plan)]

    def finish(self, plan: StepPlan | None = None, *, eos: tuple[str, ...] = ()) -> StepOutcome:
        """The result of a plan (None: of the only one made last); those in `eos` get EOS, others a token of no meaning."""
        [plan] = self.plans if plan is None else [plan]
        sampled = [entry for entry in plan.scheduled if entry.samples]
        tokens = {entry.name: [EOS if entry.request_id in eos else 5] for entry in sampled}
        return self.core.update(StepResult(plan.step, tokens))

    def step(self, *, eos: tuple[str, ...] = ()) -> list[Share]:
        """Plans, and the results are there at once."""
        planned = self.plan()
        for plan in self.plans:
            self.finish(plan, eos=eos)
        return planned

    def run(self, most: int = 500) -> list[list[Share]]:
        """Steps until nothing is left."""
        steps: list[list[Share]] = []
        while self.core.has_unfinished:
            steps.append(self.step())
            assert len(steps) < most, "livelock"
        return steps

    def group(self, name: str) -> Group:
        """The only group of a live request."""
        request = self.core.request(name)
        assert request is not None
        [group] = request.groups
        return group

    def pool(self) -> list[str]:
        """Ids of live tasks in their order."""
        return list(self.core.state.requests)

    def __getitem__(self, name: str) -> Any:
        """What a part of the policy shows."""
        return self.core.view()[name]


def shares(plan: StepPlan) -> list[Share]:
    """Of one plan."""
    return [(e.request_id, "P" if e.is_prefill else "D", e.computed_before, e.num_tokens) for e in plan.scheduled]


def ids(planned: list[Share]) -> list[str]:
    """Ids of the scheduled tasks."""
    return [name for name, _, _, _ in planned]
