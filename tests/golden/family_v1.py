"""Family v1: vLLM V1's scheduler. Drives the presets `vllm-v1` and `vllm-v1-async` as the recorded engine drove the reference."""

from typing import Any

from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import ScheduledSequence, StepOutcome, StepPlan, StepResult
from scheduler_svc.core.request import Request, SequenceStatus
from scheduler_svc.core.request_rules import StopRules
from scheduler_svc.core.scheduler import Scheduler
from tests.golden.forms_vllm import check_v1
from tests.golden.scenario import Scenario
from tests.support.core.batch_queue import BatchQueue

EOS = 99999
_PAST_THE_END = 7
_DRAFT_PATTERN = 7
_REASONS = {SequenceStatus.FINISHED_STOPPED: "stop", SequenceStatus.FINISHED_LENGTH_CAPPED: "length"}

Record = dict[str, Any]


def run(scenario: Scenario, *, fast_path: bool = True) -> list[Record]:
    """The trace that the core gives. ScenarioError for what is not of the form."""
    check_v1(scenario.data)
    return _Run(scenario, fast_path=fast_path).trace()


def _build(config: dict[str, Any], *, fast_path: bool) -> Scheduler:
    limits = CoreLimits(
        block_size=config["block_size"],
        num_gpu_blocks=config["num_gpu_blocks"],
        max_model_len=config["max_model_len"],
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        prefix_caching=config["prefix_caching"],
        chunked_prefill=config["chunked_prefill"],
        long_prefill_token_threshold=config["long_prefill_token_threshold"],
    )
    return presets.build(
        "vllm-v1-async" if config["async"] else "vllm-v1",
        limits,
        policy=config["policy"],
        num_spec_tokens=config.get("num_spec_tokens", 0),
        batch_queue=config.get("batch_queue", 2 if config["async"] else 1),
        fast_path=fast_path,
    )


class _Worker:
    """The model of the scenario. It knows tokens in the order in which plans are sent off, before the scheduler does."""

    def __init__(self, inputs: dict[str, Record]) -> None:
        self._inputs = inputs
        self._num_made = dict.fromkeys(inputs, 0)

    def execute(self, plan: StepPlan) -> StepResult:
        """What comes back for the plan."""
        made = {entry.name: self._tokens(entry) for entry in plan.scheduled}
        return StepResult(plan.step, {name: tokens for name, tokens in made.items() if tokens})

    def drafts(self, given: str, num_made: int, num_drafts: int) -> list[int]:
        """Guesses of the tokens after the first `num_made`."""
        places = range(num_made, num_made + num_drafts)
        return [self._right(given, at) + (not self._is_guessed(given, at)) for at in places]

    def _tokens(self, entry: ScheduledSequence) -> list[int]:
        given, num_made = entry.request_id, self._num_made[entry.request_id]
        if entry.computed_before + entry.num_tokens - entry.num_drafts < entry.num_prompt_tokens + num_made:
            return []
        end = num_made
        while end < num_made + entry.num_drafts and self._is_guessed(given, end):
            end += 1
        self._num_made[given] = end + 1
        return [self._right(given, at) for at in range(num_made, end + 1)]

    def _right(self, given: str, at: int) -> int:
        outputs: list[int] = self._inputs[given]["outputs"]
        return outputs[at] if at < len(outputs) else _PAST_THE_END

    def _is_guessed(self, given: str, at: int) -> bool:
        return bool(self._inputs[given]["draft_ok"][at % _DRAFT_PATTERN])


class _Run:
    """One scenario in flight."""

    def __init__(self, scenario: Scenario, *, fast_path: bool) -> None:
        config = scenario.config
        self._steps = scenario.steps()
        self._inputs = {r["id"]: r for r in scenario.data["requests"]}
        self._aborts = list(scenario.data.get("aborts", []))
        self._core = _build(config, fast_path=fast_path)
        self._queue = BatchQueue(self._core)
        self._worker = _Worker(self._inputs)
        self._num_drafts = 0 if config["async"] else config.get("num_spec_tokens", 0)
        self._results: dict[int, tuple[int, StepPlan, StepResult]] = {}

    def trace(self) -> list[Record]:
        last = max([r["arrival_step"] for r in self._inputs.values()] + [a["step"] for a in self._aborts], default=0)
        records = []
        for step in self._steps:
            self._arrive(step)
            self._core.abort(self._aborts_due(step, "before_schedule"))
            if self._queue.is_idle and step > last:
                return records
            records.append(self._record(step))

    def _arrive(self, step: int) -> None:
        for given in self._inputs.values():
            if given["arrival_step"] == step:
                stop = StopRules(max_tokens=given["max_tokens"], eos_token_ids=frozenset([EOS]))
                self._core.add(
                    Request(given["id"], given["prompt"], stop, given["arrival_time"], priority=given["priority"])
                )

    def _aborts_due(self, step: int, when: str) -> list[str]:
        due = [a for a in self._aborts if a.get("when", "before_schedule") == when and a["step"] <= step]
        self._aborts = [a for a in self._aborts if a not in due]
        return [a["id"] for a in due]

    def _record(self, step: int) -> Record:
        plan = self._queue.plan(now=1000.0 + step)
        record: Record = {"step": step, "idle": True} if plan is None else self._planned(step, plan) | {"update": None}
        if plan is not None:
            self._results[plan.step] = (step, plan, self._worker.execute(plan))
        self._queue.abort_later(self._aborts_due(step, "before_update"))
        if (due := self._queue.due) is not None:
            record["update"] = self._update(*self._results.pop(due.step))
        return record

    def _update(self, step: int, plan: StepPlan, result: StepResult) -> Record:
        record = self._updated(step, self._queue.update(result))
        if self._num_drafts:
            record["drafts"] = self._hand_over_drafts(plan)
        return record

    def _hand_over_drafts(self, plan: StepPlan) -> dict[str, list[int]]:
        """Guesses for all of the plan that live and have their prompt behind them."""
        drafts = {}
        for entry in plan.scheduled:
            request = self._core.request(entry.request_id)
            if request is not None and request.sequences[0].num_computed_tokens >= entry.num_prompt_tokens:
                made = request.sequences[0].num_output_tokens
                drafts[entry.request_id] = self._worker.drafts(entry.request_id, made, self._num_drafts)
        self._core.put_drafts({f"{given}/0": tokens for given, tokens in drafts.items()})
        return drafts

    # --- records -------------------------------------------------------------------------------------------------

    def _planned(self, step: int, plan: StepPlan) -> Record:
        return {
            "step": step,
            "scheduled": [[e.request_id, e.num_tokens] for e in plan.scheduled],
            "total": plan.num_tokens,
            "new": [e.request_id for e in plan.scheduled if e.fresh and not e.resumed],
            "resumed": [e.request_id for e in plan.scheduled if e.resumed],
            "computed_before": {e.request_id: e.computed_before for e in plan.scheduled},
            "preempted": [request_id for request_id, _ in plan.preempted],
            "lookups": [list(lookup) for lookup in plan.lookups],
            "spec": {e.request_id: e.num_drafts for e in plan.scheduled if e.num_drafts},
            "finished_req_ids": sorted(plan.finished),
            "queues": self._queues(),
            "free": plan.free_gpu,
            "tables": self._tables(),
            "placeholders": self._placeholders(),
        }

    def _updated(self, step: int, outcome: StepOutcome) -> Record:
        return {
            "for_step": step,
            "tokens": {r.request_id: r.token_ids for r in outcome.runs},
            "finished": {e.request_id: _REASONS[e.status] for e in outcome.ended if e.status in _REASONS},
            "queues": self._queues(),
            "free": self._core.pool_report().gpu.free,
        }

    def _queues(self) -> dict[str, list[str]]:
        state = self._core.state
        return {
            "waiting": [group.request.request_id for group in state.waiting],
            "running": [group.request.request_id for group in state.running],
        }

    def _tables(self) -> dict[str, list[int]]:
        canonical: dict[str, int] = {}
        tables = self._core.block_tables()
        held = {given: tables[f"{given}/0"] for given in self._inputs if tables.get(f"{given}/0")}
        return {given: [canonical.setdefault(b, len(canonical)) for b in blocks] for given, blocks in held.items()}

    def _placeholders(self) -> dict[str, int]:
        counts = {given: request.sequences[0].num_placeholders for given, request in self._core.state.requests.items()}
        return {given: count for given, count in counts.items() if count}
