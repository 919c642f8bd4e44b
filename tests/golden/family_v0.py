"""Families v0 and v0bm1: vLLM 0.6.3, and 0.6.2 over the block manager of 2023, driven as the recorded engines were."""

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from scheduler_svc.core.composition import presets
from scheduler_svc.core.errors import StepFailed
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import ScheduledSequence, SequenceTokens, StepOutcome, StepPlan, StepResult
from scheduler_svc.core.request import Request, SequenceStatus
from scheduler_svc.core.request_rules import StopRules
from scheduler_svc.core.scheduler import Scheduler
from tests.golden.forms import refused
from tests.golden.forms_vllm import check_v0
from tests.golden.scenario import Scenario

_IGNORED = SequenceStatus.FINISHED_IGNORED
_END = 2**31 - 1


def run(scenario: Scenario, *, fast_path: bool = True) -> list[dict[str, Any]]:
    """The trace that the core gives. ScenarioError for what is not of the form."""
    check_v0(scenario.data)
    return _Run(scenario, fast_path=fast_path).trace()


def build(scenario: Scenario, *, fast_path: bool) -> Scheduler:
    """The preset that the configuration names, with its knobs."""
    config = scenario.config
    limits = CoreLimits(
        block_size=config["block_size"],
        num_gpu_blocks=config["num_gpu_blocks"],
        num_cpu_blocks=config["num_cpu_blocks"],
        max_model_len=config["max_model_len"],
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        prefix_caching=config["prefix_caching"],
        chunked_prefill=config["chunked_prefill"],
    )
    name = "vllm-v0-chunked" if config["chunked_prefill"] else "vllm-v0"
    spec = presets.preset(
        name,
        policy=config["policy"],
        preemption_mode=config["preemption_mode"],
        defects="recorded",
        delay_factor=config["delay_factor"],
        max_loras=config.get("max_loras"),
        num_lookahead_slots=config.get("num_lookahead_slots", 0),
        watermark_blocks=config.get("watermark_blocks"),
        sliding_window=config.get("sliding_window"),
        async_output=config.get("async_output", False),
        cache="vllm_2023" if scenario.family == "v0bm1" else "vllm_063",
        fast_path=fast_path,
    )
    return presets.build(spec, limits)


@dataclass
class _Given:
    """A request of the scenario, and which sample each of its sequences is."""

    data: dict[str, Any]
    request: Request
    sample: dict[str, int] = field(default_factory=dict)
    expected: dict[str, list[int]] = field(default_factory=dict)

    def token(self, sample: int, num_output: int) -> int:
        """The sample's next token. Samples may end at different lengths: the last token of each says so."""
        outputs = self.data["outputs"][sample]
        if num_output >= len(outputs):
            return _END
        is_last = num_output == len(outputs) - 1
        return _END if is_last and self.data["n"] > 1 else outputs[num_output]

    def learn(self, runs: list[SequenceTokens]) -> None:
        """Forks got their names: in the order in which they were asked for."""
        for run in runs:
            if expected := self.expected.get(run.forked_from or run.name):
                self.sample[run.name] = expected.pop(0)
        self.expected.clear()


class _Run:
    """One scenario in flight."""

    def __init__(self, scenario: Scenario, *, fast_path: bool) -> None:
        self._config = scenario.config
        self._steps = scenario.steps()
        self._clock: list[float] | None = scenario.data.get("clock")
        self._inputs = scenario.data["requests"]
        self._aborts = scenario.data.get("aborts", [])
        self._given: dict[str, _Given] = {}
        self._core = build(scenario, fast_path=fast_path)
        if not self._config.get("async_output"):
            self._core.state.max_total_tokens = _END  # these engines stopped a sequence by its outputs alone

    def trace(self) -> list[dict[str, Any]]:
        last = max([r["arrival_step"] for r in self._inputs] + [a["step"] for a in self._aborts], default=0)
        records: list[dict[str, Any]] = []
        for step in self._steps:
            self._arrive(step)
            self._core.abort([a["id"] for a in self._aborts if a["step"] == step])
            if not self._core.has_unfinished and step > last:
                return records
            records.append(self._record(step))
            if "error" in records[-1]:
                return records

    def _arrive(self, step: int) -> None:
        for data in self._inputs:
            if data["arrival_step"] == step:
                longest = max(map(len, data["outputs"]))
                request = Request(
                    data["id"],
                    data["prompt"],
                    StopRules(max_tokens=longest, eos_token_ids=frozenset([_END])),
                    data["arrival_time"],
                    priority=data["priority"],
                    n=data["n"],
                    lora_id=data.get("lora") or 0,
                )
                self._given[data["id"]] = _Given(data, request, {f"{data['id']}/0": 0})
                self._core.add(request)

    def _record(self, step: int) -> dict[str, Any]:
        try:
            [plan] = self._core.schedule(self._now(step))
        except StepFailed as error:
            return {"step": step, "error": "cpu_swap_space", "events": [list(event) for event in error.preempted]}
        record = self._planned(step, plan)
        outcome = self._core.update(self._model(plan))
        for given in self._given.values():
            given.learn([run for run in outcome.runs if run.request_id == given.data["id"]])
        return record | self._updated(outcome)

    def _now(self, step: int) -> float:
        if self._clock is None:
            return 1000.0 + step
        if step >= len(self._clock):
            raise refused("file.clock", f"there is no time for step {step}", self._clock)
        return self._clock[step]

    # --- the model -----------------------------------------------------------------------------------------------

    def _model(self, plan: StepPlan) -> StepResult:
        """What the scenario's model gives for a plan."""
        result = StepResult(plan.step)
        for request_id, entries in groupby(plan.scheduled, key=lambda e: e.request_id):
            sampled = [(e, e.computed_before + e.num_tokens - e.num_prompt_tokens) for e in entries if e.samples]
            if sampled:
                self._sample(self._given[request_id], sampled, result)
        return result

    def _sample(self, given: _Given, sampled: list[tuple[ScheduledSequence, int]], result: StepResult) -> None:
        first, num_output = sampled[0]
        parents = given.data.get("beam_parents") or []
        if num_output == 0 and given.data["n"] > 1:
            self._branch(given, {first.name: list(range(given.data["n"]))}, 0, result)
        elif 0 < num_output <= len(parents) and given.data["n"] > 1:
            names = [entry.name for entry, _ in sampled]
            chosen: dict[str, list[int]] = {name: [] for name in names}
            for sample, parent in enumerate(parents[num_output - 1]):
                if parent >= len(names):
                    where = f"requests[{self._inputs.index(given.data)}].beam_parents[{num_output - 1}]"
                    raise refused(where, f"there are {len(names)} running sequences", parents[num_output - 1])
                chosen[names[parent]].append(sample)
            self._branch(given, chosen, num_output, result)
        else:
            for entry, num in sampled:
                result.tokens[entry.name] = [given.token(given.sample[entry.name], num)]

    @staticmethod
    def _branch(given: _Given, chosen: dict[str, list[int]], num_output: int, result: StepResult) -> None:
        for name, samples in chosen.items():
            result.children[name] = [given.token(sample, num_output) for sample in samples]
            given.expected[name] = list(samples)

    # --- records -------------------------------------------------------------------------------------------------

    def _planned(self, step: int, plan: StepPlan) -> dict[str, Any]:
        ignored = dict.fromkeys(e.request_id for e in plan.ended if e.status is _IGNORED)
        record = {
            "step": step,
            "scheduled": self._scheduled(plan),
            "num_prefill_groups": plan.num_prefill_groups,
            "num_batched_tokens": plan.num_batched_tokens,
            "swap_in": [len(plan.swap_in), plan.swapped_in],
            "swap_out": [len(plan.swap_out), plan.swapped_out],
            "copy": [len(plan.copy), plan.copied],
            "preempt_events": [list(event) for event in plan.preempted],
            "preempted_count": plan.num_preempted,
            "ignored": list(ignored),
            "empty": plan.is_empty,
            "queues": self._queues(),
            "free": self._free(),
            "tables": self._tables(),
        }
        if self._config.get("async_output"):
            record["allow_async"] = all(self._given[e.request_id].data["n"] == 1 for e in plan.scheduled)
            record["async_stopped"] = plan.late
            record["finished_in_schedule"] = [e.name for e in plan.ended if e.status is not _IGNORED]
        return record

    def _scheduled(self, plan: StepPlan) -> list[dict[str, Any]]:
        groups = []
        for request_id, found in groupby(plan.scheduled, key=lambda e: e.request_id):
            entries = list(found)
            first, oldest = entries[0], self._given[request_id].request.sequences[0]
            groups.append(
                {
                    "id": request_id,
                    "chunk": first.num_tokens,
                    "prompt": first.is_prefill
                    and first.name == oldest.name,  # recorded: of the oldest, even if finished (R203)
                    "sample": first.samples,
                    "seqs": [entry.name for entry in entries],
                    "cached_blocks": first.num_cached_blocks,
                }
            )
        return groups

    def _updated(self, outcome: StepOutcome) -> dict[str, Any]:
        after: dict[str, Any] = {"queues": self._queues(), "free": self._free()}
        if self._config["prefix_caching"]:
            after["hits"] = list(self._core.state.cache.hits)
        record: dict[str, Any] = {"finished_seqs": [e.name for e in outcome.ended], "after": after}
        if outcome.dropped:
            record["dropped_seqs"] = outcome.dropped
        return record

    def _queues(self) -> dict[str, list[str]]:
        state = self._core.state
        queues = {"waiting": list(state.waiting), "running": state.running, "swapped": state.swapped}
        return {name: [group.request.request_id for group in groups] for name, groups in queues.items()}

    def _free(self) -> list[int]:
        return [self._core.state.cache.num_free_gpu, self._core.state.cache.num_free_cpu]

    def _tables(self) -> dict[str, list[str]]:
        """Canonical names in order of first occurrence, requests in file order, sequences in group order."""
        names: dict[str, str] = {}
        tables, found = self._core.block_tables(), {}
        for data in self._inputs:
            given = self._given.get(data["id"])
            for sequence in given.request.sequences if given else ():
                blocks = tables.get(sequence.name, [])
                if blocks:
                    found[sequence.name] = [names.setdefault(b, f"{b[0]}{len(names)}") for b in blocks]
        return found
