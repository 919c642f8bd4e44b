"""Family v1: vLLM V1's scheduler. Drives the preset `vllm-v1` as the recorded engine drove the reference."""

from typing import Any

from scheduler_svc.core import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepOutcome, StepPlan, StepResult
from scheduler_svc.core.request import Request, SequenceStatus, StopRules
from tests.golden.scenario import Scenario, require

EOS = 99999
_PAST_THE_END = 7
_CONFIG = {
    "block_size", "num_gpu_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "policy",
    "chunked_prefill", "prefix_caching", "async", "long_prefill_token_threshold",
}  # fmt: skip
_REQUEST = {"id", "arrival_step", "prompt", "outputs", "arrival_time", "max_tokens", "priority"}
_REASONS = {SequenceStatus.FINISHED_STOPPED: "stop", SequenceStatus.FINISHED_LENGTH_CAPPED: "length"}


def reason_to_skip(scenario: Scenario) -> str | None:
    """What the scenario needs that is not built yet."""
    config = scenario.config
    if config.get("async"):
        return "asynchronous scheduling is not built yet"
    if config.get("num_spec_tokens"):
        return "speculative tokens are not built yet"
    if config.get("batch_queue", 1) > 1:
        return "the batch queue is not built yet"
    return None


def run(scenario: Scenario) -> list[dict[str, Any]]:
    """The trace that the core gives. ScenarioError for unknown or missing fields."""
    require(scenario.config, "config", _CONFIG, {"num_spec_tokens", "batch_queue"})
    for i, request in enumerate(scenario.data["requests"]):
        require(request, f"requests[{i}]", _REQUEST, {"draft_ok"})
    return _Run(scenario).trace()


class _Run:
    """One scenario under way."""

    def __init__(self, scenario: Scenario) -> None:
        config = scenario.config
        self._inputs = {r["id"]: r for r in scenario.data["requests"]}
        self._aborts = list(scenario.data.get("aborts", []))
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
        self._core = presets.build("vllm-v1", limits, policy=config["policy"])

    def trace(self) -> list[dict[str, Any]]:
        last = max([r["arrival_step"] for r in self._inputs.values()] + [a["step"] for a in self._aborts], default=0)
        records = []
        step = 0
        while True:
            self._arrive(step)
            self._abort(step, "before_schedule")
            if not self._core.has_unfinished and step > last:
                return records
            records.append(self._record(step))
            step += 1

    def _arrive(self, step: int) -> None:
        for given in self._inputs.values():
            if given["arrival_step"] == step:
                stop = StopRules(max_tokens=given["max_tokens"], eos_token_ids=frozenset([EOS]))
                self._core.add(
                    Request(given["id"], given["prompt"], stop, given["arrival_time"], priority=given["priority"])
                )

    def _abort(self, step: int, when: str) -> None:
        due = [a for a in self._aborts if a.get("when", "before_schedule") == when and a["step"] <= step]
        self._aborts = [a for a in self._aborts if a not in due]
        self._core.abort([a["id"] for a in due])

    def _record(self, step: int) -> dict[str, Any]:
        if not self._core.has_unfinished:
            return {"step": step, "idle": True}
        [plan] = self._core.schedule(now=1000.0 + step)
        record = self._planned(step, plan)
        self._abort(step, "before_update")
        outcome = self._core.update(StepResult(plan.step, self._model(plan)))
        return record | {"update": self._updated(step, outcome)}

    def _model(self, plan: StepPlan) -> dict[str, list[int]]:
        tokens = {}
        for entry in plan.scheduled:
            if entry.samples:
                outputs = self._inputs[entry.request_id]["outputs"]
                made = entry.computed_before + entry.num_tokens - entry.num_prompt_tokens
                tokens[entry.name] = [outputs[made] if made < len(outputs) else _PAST_THE_END]
        return tokens

    # --- records -------------------------------------------------------------------------------------------------

    def _planned(self, step: int, plan: StepPlan) -> dict[str, Any]:
        return {
            "step": step,
            "scheduled": [[e.request_id, e.num_tokens] for e in plan.scheduled],
            "total": plan.num_tokens,
            "new": [e.request_id for e in plan.scheduled if e.fresh and not e.resumed],
            "resumed": [e.request_id for e in plan.scheduled if e.resumed],
            "computed_before": {e.request_id: e.computed_before for e in plan.scheduled},
            "preempted": [request_id for request_id, _ in plan.preempted],
            "lookups": [list(lookup) for lookup in plan.lookups],
            "spec": {},
            "finished_req_ids": sorted(plan.finished),
            "queues": self._queues(),
            "free": plan.free_gpu,
            "tables": self._tables(),
            "placeholders": {},
        }

    def _updated(self, step: int, outcome: StepOutcome) -> dict[str, Any]:
        return {
            "for_step": step,
            "tokens": {r.request_id: r.token_ids for r in outcome.runs},
            "finished": {e.request_id: _REASONS[e.status] for e in outcome.ended},
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
