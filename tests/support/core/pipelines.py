"""Cores with several plans in flight, a worker that knows tokens before the scheduler does, and the loop between them."""

from collections.abc import Callable

from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import ScheduledSequence, StepOutcome, StepPlan, StepResult
from scheduler_svc.core.scheduler import Scheduler
from tests.support.core.batch_queue import BatchQueue
from tests.support.core.builders import next_token

Model = Callable[[str, int], int]


def build(
    preset: str,
    *,
    order: str = "fcfs",
    drafts: int = 0,
    depth: int | None = None,
    fast_path: bool = True,
    **limits: int,
) -> Scheduler:
    """A core of that preset with small numbers."""
    given = {
        "block_size": 4,
        "num_gpu_blocks": 65,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
    }
    spec = presets.preset(preset, policy=order, num_spec_tokens=drafts, fast_path=fast_path)
    knobs = {} if depth is None else {"batch_queue": depth}
    return presets.build(spec, CoreLimits(**{**given, **limits}), **knobs)


class Worker:
    """Executes plans in order; token number i of a sequence (its prompt counted) is `model(name, i)`.

    Of the guesses in a plan it finds those right whose place is no multiple of `wrong_every`. A plan that was made before guesses
    turned out wrong reaches beyond what is known; the worker goes on from what it knows.
    """

    def __init__(self, model: Model = next_token, wrong_every: int = 3) -> None:
        self._model = model
        self._wrong_every = wrong_every
        self._num_known: dict[str, int] = {}
        self._num_guessed = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """What comes back for a plan."""
        made = {entry.name: self._tokens(entry) for entry in plan.scheduled}
        return StepResult(plan.step, {name: tokens for name, tokens in made.items() if tokens})

    def learn(self, name: str, num_tokens: int) -> None:
        """It knows that many tokens of a sequence, as after a restart."""
        self._num_known[name] = num_tokens

    def _tokens(self, entry: ScheduledSequence) -> list[int]:
        known = self._num_known.setdefault(entry.name, entry.num_prompt_tokens)
        reach = entry.computed_before + entry.num_tokens - entry.num_drafts
        self._num_guessed += entry.num_drafts
        assert reach <= known or self._num_guessed, "a token is to be computed that is not known"
        assert (reach >= known) == entry.samples, "scheduler and worker disagree on which sequence gets a token"
        if reach < known:
            return []
        end = known
        while end < known + entry.num_drafts and end % self._wrong_every:
            end += 1
        self._num_known[entry.name] = end + 1
        return [self._model(entry.name, at) for at in range(known, end + 1)]


class Loop:
    """Drives a core through its batch queue. `plans` and `outcomes`: all so far, in order."""

    def __init__(self, core: Scheduler, worker: Worker | None = None) -> None:
        self.core = core
        self.queue = BatchQueue(core)
        self.worker = worker or Worker()
        self.plans: list[StepPlan] = []
        self.outcomes: list[StepOutcome] = []
        self.results: dict[int, StepResult] = {}

    def step(self, abort_meanwhile: tuple[str, ...] = ()) -> StepOutcome | None:
        """One step; what its update did, None when no result was due. `abort_meanwhile`: aborts that come while plans execute."""
        self.send_off()
        self.queue.abort_later(abort_meanwhile)
        return self.take()

    def send_off(self) -> StepPlan | None:
        """Plans and executes."""
        plan = self.queue.plan(float(len(self.plans)))
        if plan is not None:
            self.plans.append(plan)
            self.results[plan.step] = self.worker.execute(plan)
        return plan

    def take(self) -> StepOutcome | None:
        """Applies the result that is due, if one is."""
        due = self.queue.due
        if due is None:
            return None
        self.outcomes.append(self.queue.update(self.results.pop(due.step)))
        return self.outcomes[-1]

    def run(self, most: int = 500) -> dict[str, list[int]]:
        """Steps until nothing is left; all output tokens by sequence name."""
        while not self.queue.is_idle:
            self.step()
            assert len(self.plans) < most, "livelock"
        return self.tokens()

    def tokens(self) -> dict[str, list[int]]:
        """Output tokens so far, by sequence name."""
        got: dict[str, list[int]] = {}
        for run in (run for outcome in self.outcomes for run in outcome.runs):
            assert run.offset == len(got.setdefault(run.name, [])), "a token was lost or repeated"
            got[run.name] += run.token_ids
        return got
