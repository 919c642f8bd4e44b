"""Family chitu: drives the presets `chitu`, `chitu-skew` and `chitu-dp` as the recorded loop drove the reference.

Tasks have lengths only, so their tokens are all alike. Times are taken from the start of the scenario's clock.
"""

from dataclasses import dataclass, field
from typing import Any

from scheduler_svc.core.composition import presets
from scheduler_svc.core.errors import TaskDoesNotFit
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import EndedSequence, ScheduledSequence, StepPlan, StepResult
from scheduler_svc.core.request import Group, Request
from scheduler_svc.core.request_rules import StopRules
from scheduler_svc.core.scheduler import Scheduler
from svc_common.errors import ConfigError
from tests.golden.forms_chitu import check_chitu
from tests.golden.scenario import Scenario

EOS, _TOKEN = 0, 1
_NS_PER_S = 1e9
_PP_CONFIG = (
    "prefill_num_tasks_divided_by_pp",
    "prefill_num_tasks",
    "enforce_decode_num_tasks_max",
    "decode_num_tasks",
)
_LIMITS = {
    "prefill_num_tasks": "max_prefill_tasks",
    "decode_num_tasks": "max_decode_tasks",
    "num_scheduler_groups": "num_scheduler_groups",
}

Record = dict[str, Any]
Entry = list[Any]


def run(scenario: Scenario, *, fast_path: bool = True, defects: str = "recorded") -> list[Record]:
    """The trace that the core gives. ScenarioError for what is not of the form."""
    check_chitu(scenario.data)
    kind = _kind(scenario.config["infer"])
    try:
        core = _build(scenario, fast_path=fast_path, defects=defects)
    except ConfigError as error:
        if error.metadata.get("field") != "scheduler_type":
            raise
        return [{"step": 0, "error": {"kind": "unknown_scheduler_type"}, "evicted": []}]
    return kind(scenario, core).trace()


def _kind(infer: dict[str, Any]) -> "type[_Run]":
    if infer["dp_size"] > 1:
        return _RanksRun
    return _SlotsRun if infer["cache_type"] == "skew" else _GroupsRun


def _build(scenario: Scenario, *, fast_path: bool, defects: str) -> Scheduler:
    """Sizes that the reference does not know are too large to matter; so are blocks where it keeps no account of them."""
    infer, scheduler, tasks = scenario.config["infer"], scenario.config["scheduler"], scenario.data["tasks"]
    kind = _kind(infer)
    longest = sum(task["prompt_len"] + task["max_new_tokens"] + 1 for task in tasks) + 1
    num_blocks = infer["num_blocks"] if kind is _GroupsRun else longest
    limits = CoreLimits(
        block_size=infer["block_size"],
        num_gpu_blocks=num_blocks + 1,
        max_model_len=longest,
        max_num_seqs=max(1, len(tasks)),
        max_num_batched_tokens=longest + len(tasks),
        prefix_caching=False,
    )
    given = scheduler.get("pp_config") or {}
    knobs = {name: given[name] for name in _PP_CONFIG if name in given}
    overrides = (scenario.config.get("limits") or {}) if kind is not _RanksRun else {}
    knobs |= {knob: overrides[name] for name, knob in _LIMITS.items() if overrides.get(name) is not None}
    return presets.build(
        kind.preset,
        limits,
        scheduler_type="" if kind is _RanksRun else scheduler["type"],  # DP does not look at it
        max_reqs=infer["max_reqs"],
        pp_size=infer["pp_size"],
        dp_size=infer["dp_size"],
        prefill_chunk_size=infer["prefill_chunk_size"],
        defects=defects,
        fast_path=fast_path,
        **knobs,
    )


@dataclass(slots=True)
class _Batch:
    """What was planned in one step, and when its results come. `plans`: one for each rank."""

    plans: list[StepPlan]
    due: int
    results: list[StepResult] = field(default_factory=list)

    @property
    def entries(self) -> list[ScheduledSequence]:
        """The union of all ranks' lists."""
        return [entry for plan in self.plans for entry in plan.scheduled]


class _Run:
    """One scenario in flight."""

    preset = "chitu"

    def __init__(self, scenario: Scenario, core: Scheduler) -> None:
        config = scenario.config
        self._steps = scenario.steps()
        self._tasks = scenario.data["tasks"]
        self._inputs = {task["id"]: task for task in self._tasks}
        self._events = scenario.data.get("events") or []
        self._core = core
        self._clock = config["clock"]
        self._lags = config["lag"] if isinstance(config["lag"], list) else [config["lag"]]
        self._num_batches = 0
        self._has_handoff = config.get("handoff", False)
        self._stop_step = config.get("stop_step")
        self._in_flight: list[_Batch] = []
        self._waiting: dict[int, list[str]] = {}

    def trace(self) -> list[Record]:
        records: list[Record] = []
        last = max([task["arrival_step"] for task in self._tasks] + [e["step"] for e in self._events], default=-1)
        for step in self._steps:
            self._take_inputs(step)
            if step == self._stop_step or (step >= last and not self._core.has_unfinished):
                return records
            try:
                records.append(self._record(step))
            except TaskDoesNotFit as error:
                kind = {"kind": error.kind, "prefix_len": error.num_tokens}
                return [*records, {"step": step, "error": kind, "evicted": [list(e) for e in error.evicted]}]

    def _take_inputs(self, step: int) -> None:
        for event in self._events:
            if event["step"] == step:
                self._core.warm_up(on=event["warmup"])
        for task in self._tasks:
            if task["arrival_step"] == step:
                self._add(task)

    def _add(self, task: Record) -> None:
        request = Request(
            task["id"],
            [_TOKEN] * task["prompt_len"],
            StopRules(max_tokens=task["max_new_tokens"], eos_token_ids=frozenset([EOS])),
            self._seconds(self._arrival_ns(task)),
            priority=-task["priority"],
            committed=[_TOKEN] if task.get("prefilled") else [],
        )
        if task.get("prefilled"):
            self._core.add_prefilled(request)
        else:
            self._core.add(request)

    def _arrival_ns(self, task: Record) -> int:
        ns: int = task["arrv_ts"]
        return ns

    def _seconds(self, ns: int) -> float:
        return (ns - self._clock["start_ns"]) / _NS_PER_S

    # --- one step ------------------------------------------------------------------------------------------------

    def _record(self, step: int) -> Record:
        held = {name: len(blocks) for name, blocks in self._core.block_tables().items()}
        now_ns = self._clock["start_ns"] + step * self._clock["step_ns"]
        plans = self._core.schedule(self._seconds(now_ns))
        batch = _Batch(plans, step)
        for plan in plans:
            if not plan.is_empty:
                self._waiting[plan.step] = sorted(entry.request_id for entry in plan.scheduled)
        record = {"step": step, **self._planned(plans, held)}
        if batch.entries:
            batch.due = step + self._lags[self._num_batches % len(self._lags)]
            self._num_batches += 1
            batch.results = [_result(plan, self._core, self._inputs) for plan in plans if not plan.is_empty]
            self._in_flight.append(batch)
        return record | {"after": self._after(step, batch)}

    def _after(self, step: int, own: _Batch) -> Record:
        arrived = [batch for batch in self._in_flight if batch.due <= step]
        self._in_flight = [batch for batch in self._in_flight if batch.due > step]
        entries = [entry for batch in arrived for entry in batch.entries]
        ended: list[EndedSequence] = []
        for result in (result for batch in arrived for result in batch.results):
            ended += self._core.update(result).ended
            del self._waiting[result.step]
        over = {end.request_id for end in ended}
        in_order = [*(own.entries if own in arrived else []), *entries]
        record = {
            "arrived": [entry.request_id for entry in entries],
            "outputs": [entry.request_id for entry in entries if entry.samples],
            "removed": list(dict.fromkeys(e.request_id for e in in_order if e.request_id in over)),
        }
        self._core.view()  # finished tasks release their slots before others are handed off
        if self._has_handoff:
            record["handed_off"] = self._hand_off()
        return record | {"pool": self._pool()} | self._lanes(is_after=True)

    def _hand_off(self) -> list[str]:
        """Prefilled tasks leave; what ends them here is no matter of the scheduler's."""
        gone = [group.request.request_id for group in self._groups() if not (group.in_prefill or _is_in_flight(group))]
        self._core.abort(gone)
        return gone

    # --- records -------------------------------------------------------------------------------------------------

    def _planned(self, plans: list[StepPlan], held: dict[str, int]) -> Record:
        view = self._core.view()
        entries = [entry for plan in plans for entry in plan.scheduled]
        used = [lane for lane, in_flight in view["used_lanes"].items() if in_flight in {plan.step for plan in plans}]
        if plans and not entries and plans[0].lane in view["used_lanes"]:
            used = [plans[0].lane]
        return {
            "scheduled": [_entry(entry) for entry in entries],
            "sgroup": used[0] if used else None,
            "evicted": [list(evicted) for evicted in view.get("evicted", [])] if plans else [],
            "fallback": bool(plans) and view.get("fallback", False),
            **self._lanes(is_after=False, taken=self._num_taken(entries, held)),
        }

    def _num_taken(self, entries: list[ScheduledSequence], held: dict[str, int]) -> int:
        """Blocks that the batch of this step allocated."""
        tables = self._core.block_tables()
        return sum(len(tables[entry.name]) - held.get(entry.name, 0) for entry in entries)

    def _lanes(self, *, is_after: bool, taken: int = 0) -> Record:
        """Lanes as they are; `is_after`: those whose results came are given back."""
        view = self._core.view()
        back = view["lanes_back"] if is_after else []
        used = {lane: step for lane, step in view["used_lanes"].items() if lane not in back}
        return {
            "free_sgroups": [*view["free_lanes"], *back],
            "used_sgroups": {str(lane): self._waiting.get(step, []) for lane, step in used.items()},
        } | self._own_fields(view, taken)

    def _own_fields(self, view: Record, taken: int) -> Record:
        return {"threshold": view["threshold"], "free_blocks": self._core.pool_report().gpu.free + taken}

    def _groups(self) -> list[Group]:
        return [group for request in self._core.state.requests.values() for group in request.groups]

    def _pool(self) -> list[Entry]:
        return [_in_pool(group) for group in self._groups()]


class _GroupsRun(_Run):
    """The base scheduler."""


class _SlotsRun(_Run):
    """Skew."""

    preset = "chitu-skew"

    def _own_fields(self, view: Record, taken: int) -> Record:
        return {"slots": view["slots"]}


class _RanksRun(_Run):
    """Data parallel."""

    preset = "chitu-dp"

    def __init__(self, scenario: Scenario, core: Scheduler) -> None:
        super().__init__(scenario, core)
        self._owners: dict[str, int] = {}

    def _arrival_ns(self, task: Record) -> int:
        ns: int = task["arrv_ts"] if task.get("start_time") is None else task["start_time"]
        return ns

    def _planned(self, plans: list[StepPlan], held: dict[str, int]) -> Record:
        owners = {group.request.request_id: group.lane for group in self._groups() if group.lane is not None}
        new = {given: rank for given, rank in owners.items() if given not in self._owners}
        self._owners |= new
        return {
            "ranks": [[_entry(entry) for entry in plan.scheduled] for plan in plans],
            "new_owner": new,
            "cursor": self._core.view()["cursor"],
        }

    def _lanes(self, *, is_after: bool, taken: int = 0) -> Record:
        return {}


def _result(plan: StepPlan, core: Scheduler, inputs: dict[str, Record]) -> StepResult:
    """What the batch gives: a token of each whose prefill is over, EOS where the scenario says so."""
    tokens = {}
    for entry in plan.scheduled:
        if entry.samples:
            request = core.request(entry.request_id)
            assert request is not None
            number = request.sequences[0].num_output_tokens + 1
            tokens[entry.name] = [EOS if inputs[entry.request_id].get("eos_at") == number else _TOKEN]
    return StepResult(plan.step, tokens)


def _entry(entry: ScheduledSequence) -> Entry:
    if entry.is_prefill:
        return [entry.request_id, "P", entry.computed_before, entry.num_tokens]
    return [entry.request_id, "D", entry.computed_before + 1, entry.num_tokens]


def _in_pool(group: Group) -> Entry:
    [sequence] = group.sequences
    computed = min(sequence.num_computed_tokens, sequence.prefill_end)
    kind = "P" if group.in_prefill else "D"
    return [group.request.request_id, kind, computed, sequence.num_tokens, int(_is_in_flight(group))]


def _is_in_flight(group: Group) -> bool:
    return any(sequence.num_scheduled_tokens > 0 for sequence in group.live)
