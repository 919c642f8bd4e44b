"""What an operator chose, as one object: a policy and the limits that go with it, from names, files, `--set` and single options.

    choose("vllm-v0", ["preemption_mode=swap"], max_num_seqs=16).core_limits(worker).…

Later words win: preset, then file, then `--set`. Everything that can be wrong is a ConfigError naming where it was written.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from block_manager.hashing import Rename
from scheduler_svc import policy_file
from scheduler_svc.core import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.live_change import LIVE_KNOBS, LIVE_LIMITS, LIVE_TASK_KNOBS
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.scorers import DECODE_ONLY, PREFILL_ONLY, words_of
from scheduler_svc.core.spec import PolicySpec, knob_names
from scheduler_svc.core.task_spec import TASK_PHASES
from scheduler_svc.policy_keys import (
    ASYNC,
    CACHE_TYPE,
    CHUNKED_PREFILL,
    Assignment,
    bad,
    check_limit,
    checked,
    close_to,
    from_texts,
    limit_names,
)
from scheduler_svc.policy_lanes import cache_type_of, check_chunks, lane_phases, lanes_for
from svc_common.errors import ConfigError

Spelling = Callable[[str], str]

# The service's own default where requests carry priorities; the recordings say `fcfs` themselves.
_SERVICE_KNOBS = {"policy": "priority"}
_OPTIONS = {"prefix_caching": "enable_prefix_caching"}
_DEFAULT_NUM_SEQS = 256
_DEFAULT_BATCHED_TOKENS = 2048
_DEFAULT_CHUNKED_TOKENS = 512
_ANY_NUMBER = 2**31
_WHOLE, _CHUNKED = "prefill_or_decode", "decode_then_prefill"
_PLACEHOLDERS = "placeholders"


@dataclass(frozen=True, slots=True)
class WorkerSize:
    """What a worker has, as far as the core's limits depend on it."""

    block_size: int
    num_gpu_blocks: int
    num_cpu_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy that is sound in itself, and the limits that were given, each with where. Numbers not given follow the worker."""

    spec: PolicySpec
    given: Mapping[str, Assignment] = field(default_factory=dict)
    spelled: Spelling = str

    def max_model_len(self, of_worker: int) -> int:
        """The worker's, or less where less was asked for. ConfigError for more."""
        return self._at_most("max_model_len", of_worker, "tokens are what the worker's model takes")

    def largest_step(self, max_model_len: int) -> tuple[int, int]:
        """(tokens, sequences) of the largest step. ConfigError where they contradict each other (R48)."""
        tokens = self._limit("max_num_batched_tokens", self._default_tokens(max_model_len))
        seqs = self._limit("max_num_seqs", self._default_seqs(tokens))
        if tokens < seqs:
            raise ConfigError(
                f"{self._named('max_num_batched_tokens')} ({tokens}) must not be less than {self._named('max_num_seqs')} "
                f"({seqs}): every running sequence needs one token per step",
                reason="BAD_LIMIT",
            )
        return tokens, seqs

    def core_limits(self, worker: WorkerSize) -> CoreLimits:
        """Limits of a core on this worker. ConfigError where it has less than was asked for, or the policy cannot live with it."""
        asked = self._limit("block_size", worker.block_size)
        if asked != worker.block_size:
            raise bad(
                self.given["block_size"].origin,
                f"the worker's blocks have {worker.block_size} tokens; start it with --block-size {asked}",
            )
        max_model_len = self.max_model_len(worker.max_model_len)
        tokens, seqs = self.largest_step(max_model_len)
        fit = "blocks fit at the worker; lower it or give the worker more memory"
        limits = CoreLimits(
            block_size=worker.block_size,
            num_gpu_blocks=self._at_most("num_gpu_blocks", worker.num_gpu_blocks, fit),
            num_cpu_blocks=self._at_most("num_cpu_blocks", worker.num_cpu_blocks, fit),
            max_model_len=max_model_len,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            **self._switches(),
        )
        try:
            self.spec.check(limits)
        except ConfigError as error:
            origin = self._origin(error.metadata.get("field", "max_num_batched_tokens"))
            raise ConfigError(f"{origin}: {error.message}", reason=error.reason, metadata=error.metadata) from None
        return limits

    def effective(self) -> dict[str, Any]:
        """All keys with the values the service uses; None where the worker decides, or where nothing is the value."""
        tokens = self._limit("max_num_batched_tokens", None if self._runs_whole() else self._default_tokens(1))
        limits = {name: self._limit(name, None) for name in limit_names()} | self._switches()
        limits |= {
            "max_num_batched_tokens": tokens,
            "max_num_seqs": self._limit("max_num_seqs", self._default_seqs(tokens)),
        }
        knobs = {name: getattr(self.spec, name) for name in knob_names()}
        switches = {ASYNC: self.spec.progress == _PLACEHOLDERS, CACHE_TYPE: cache_type_of(self.spec)}
        return {**knobs, **switches, **limits}

    def build(self, limits: CoreLimits, rename: Rename | None = None) -> Scheduler:
        """The core. `rename`: as in `presets.build`."""
        return presets.build(self.spec, limits, rename=rename)

    def changed(self, sets: Iterable[str], option: str) -> "PolicyChoice":
        """The choice with other values for keys that a running core can change; ConfigError for others, by the name `option`."""
        new = {a.key: a for a in map(checked, from_texts(sets, option))}
        for key, assignment in new.items():
            live = (*(LIVE_TASK_KNOBS if self.spec.schedules_tasks else LIVE_KNOBS), *LIVE_LIMITS)
            if key not in live:
                can = f"what can be changed while the scheduler runs: {', '.join(live)}"
                raise bad(assignment.origin, f"{key} is fixed at start; {can}", field=key)
        knobs = {key: a.value for key, a in new.items() if key in knob_names()}
        try:
            spec = replace(self.spec, **knobs)
        except ConfigError as error:
            wrong = error.metadata.get("field", "")
            origin = new[wrong].origin if wrong in new else option
            raise ConfigError(f"{origin}: {error.message}", reason=error.reason, metadata=error.metadata) from None
        return _with_limits(spec, {**self.given, **new}, self.spelled)

    def check(self) -> None:
        """ConfigError for what is known to be wrong before any worker has answered, and for what no service can run yet."""
        for knob, value in self._not_served():
            raise bad(self._origin(knob), f"{knob}={value}: the core plans it, but this service cannot run it yet")
        any_length = 1 if "max_num_batched_tokens" in self.given else _ANY_NUMBER
        length = self._limit("max_model_len", any_length)
        size = WorkerSize(
            self._limit("block_size", 1),
            self._limit("num_gpu_blocks", _ANY_NUMBER),
            self._limit("num_cpu_blocks", 0),
            length,
        )
        self.core_limits(size)

    def _not_served(self) -> list[tuple[str, Any]]:
        """Knobs whose work no worker does yet, or that only the recordings want."""
        spec = self.spec
        rules = (
            ("num_spec_tokens", spec.num_spec_tokens > 0 and spec.progress != _PLACEHOLDERS),
            ("sliding_window", spec.sliding_window is not None),
            ("cache", spec.cache == "none"),
            ("defects", spec.defects == "recorded"),
            ("scheduler_type", not {PREFILL_ONLY, DECODE_ONLY}.isdisjoint(words_of(spec.scheduler_type))),
        )
        return [(knob, getattr(spec, knob)) for knob, wrong in rules if wrong]

    def _default_tokens(self, max_model_len: int) -> int:
        """R48 for the schedulers of v0; one number for the others."""
        if self.spec.phases == _CHUNKED:
            return _DEFAULT_CHUNKED_TOKENS
        return max(max_model_len, _DEFAULT_BATCHED_TOKENS) if self._runs_whole() else _DEFAULT_BATCHED_TOKENS

    def _runs_whole(self) -> bool:
        """Whether prompts are never cut, so that the budget follows the model's length."""
        if self.spec.schedules_tasks:
            return self.spec.prefill_chunk_size is None
        return self.spec.phases == _WHOLE or not (self.spec.phases == _CHUNKED or self._switches()["chunked_prefill"])

    def _is_chunked(self) -> bool:
        return self.spec.prefill_chunk_size is not None if self.spec.schedules_tasks else self.spec.phases != _WHOLE

    def _default_seqs(self, tokens: int | None) -> int:
        return _DEFAULT_NUM_SEQS if tokens is None else min(_DEFAULT_NUM_SEQS, tokens)

    def _switches(self) -> dict[str, Any]:
        return {
            "prefix_caching": self._limit("prefix_caching", not self.spec.schedules_tasks),
            "chunked_prefill": self._limit("chunked_prefill", self._is_chunked()),
            "long_prefill_token_threshold": self._limit("long_prefill_token_threshold", 0),
        }

    def _limit(self, name: str, default: Any) -> Any:
        return self.given[name].value if name in self.given else default

    def _at_most(self, name: str, most: int, why: str) -> int:
        value: int = self._limit(name, most)
        if value > most:
            raise ConfigError(f"{self._named(name)} is {value}, only {most} {why}", reason="CACHE_TOO_SMALL")
        return value

    def _named(self, limit: str) -> str:
        """A limit as the person knows it who set it; options that were not given are named as options."""
        assignment = self.given.get(limit)
        return assignment.origin.partition("=")[0] if assignment is not None else self.spelled(limit)

    def _origin(self, knob: str) -> str:
        assignment = self.given.get(knob)
        return assignment.origin if assignment is not None else f"{self.spelled('policy')} {self.spec.name}"


def choose(
    policy: str, sets: Iterable[str] = (), *, spelled: Spelling = str, num_workers: int | None = None, **limits: Any
) -> PolicyChoice:
    """The choice made by `policy` (a preset's name or a file), `sets` and single `limits` (None = not given).

    `num_workers`: that it is to drive; ranks are as many, and nothing else will do. None: as many as it wants.

    `spelled(name)`: how the person who is told of an error writes `policy`, `policy_set` and the limits. A limit beats what a file
    says of it, and contradicts a `--set` that says otherwise.
    """
    file = policy_file.read(policy) if policy_file.names_a_file(policy) else None
    base = _preset(file.base, file.base_origin) if file else _preset(policy, spelled("policy"))
    written = {a.key: a for a in map(checked, file.assignments)} if file else {}
    last = {a.key: a for a in map(checked, from_texts(sets, spelled("policy_set")))}
    options = {
        name: Assignment(name, value, spelled(_OPTIONS.get(name, name)))
        for name, value in limits.items()
        if value is not None
    }
    _refuse_two_words(last, options)
    given = written | last | options
    where = policy if file else f"{spelled('policy')} {policy}"
    if num_workers is not None:
        given = lanes_for(base, given, num_workers, where)
    spec = _spec(replace(base, name=file.name if file else base.name), given, where)
    _refuse_host_blocks(spec, (written | last).get("num_cpu_blocks"))
    return _with_limits(spec, given, spelled)


def _preset(name: str, origin: str) -> PolicySpec:
    names = presets.policy_names()
    if name not in names:
        raise ConfigError(
            f"{origin}: unknown policy {name!r}{close_to(name, names)}; there are: {', '.join(names)}; "
            f"or give a file that ends in {', '.join(policy_file.SUFFIXES)}",
            reason="UNKNOWN_POLICY",
        )
    return presets.preset(name)


def _refuse_two_words(sets: Mapping[str, Assignment], options: Mapping[str, Assignment]) -> None:
    for name, option in options.items():
        if name in sets and sets[name].value != option.value:
            raise bad(sets[name].origin, f"contradicts {option.origin}, which says {option.value}; give one of them")


def _refuse_host_blocks(spec: PolicySpec, wanted: Assignment | None) -> None:
    """Host blocks are for swapping. The service's own setting is for whatever policy runs, and is not meant here."""
    if wanted is not None and wanted.value and not spec.can_swap:
        why = f"preemption_mode={spec.preemption_mode}" if spec.preemption_mode else f"phases={spec.phases}"
        raise bad(wanted.origin, f"policy {spec.name} ({why}) never swaps; the blocks would lie idle", field=wanted.key)


def _spec(base: PolicySpec, given: Mapping[str, Assignment], where: str) -> PolicySpec:
    knobs = {key: a.value for key, a in given.items() if key not in limit_names() and key not in (ASYNC, CACHE_TYPE)}
    if "num_scheduler_steps" in knobs:
        # The slots that the further steps of a plan write to.
        knobs.setdefault("num_lookahead_slots", max(0, knobs["num_scheduler_steps"] - 1))
    phases = knobs.get("phases", base.phases)
    parts = _asynchronous(base.name, phases, given) | _chunked(phases, given) | lane_phases(base, given)
    for key, value in parts.items():
        if key in knobs and knobs[key] != value and key != "batch_queue":
            raise bad(given[key].origin, f"contradicts another key, which makes {key}={value}", field=key)
    orders_itself = phases in TASK_PHASES or base.policy == "aged"
    of_service = {} if orders_itself else _SERVICE_KNOBS
    try:
        return replace(base, **(of_service | parts | knobs))
    except ConfigError as error:
        wrong = error.metadata.get("field", "")
        origin = given[wrong].origin if wrong in given else where
        raise ConfigError(f"{origin}: {error.message}", reason=error.reason, metadata=error.metadata) from None


def _asynchronous(policy: str, phases: str, given: Mapping[str, Assignment]) -> dict[str, Any]:
    """`async` stands for how v1 counts progress and how many plans are under way (R147, R149). v0 can only do without."""
    if ASYNC not in given:
        return {}
    wanted = given[ASYNC]
    if phases in (_WHOLE, _CHUNKED, *TASK_PHASES):
        if wanted.value:
            raise bad(wanted.origin, f"{ASYNC} is v1's; policy {policy} has phases={phases}", field=ASYNC)
        return {}
    if wanted.value:
        return {"progress": _PLACEHOLDERS, "batch_queue": 2}
    return {"progress": "at_schedule", "batch_queue": 1}


def _chunked(phases: str, given: Mapping[str, Assignment]) -> dict[str, Any]:
    """Under v0 chunking is a matter of phases; under v1 it is a limit."""
    if CHUNKED_PREFILL not in given or phases not in (_WHOLE, _CHUNKED):
        return {}
    return {"phases": _CHUNKED if given[CHUNKED_PREFILL].value else _WHOLE}


def _with_limits(spec: PolicySpec, given: Mapping[str, Assignment], spelled: Spelling) -> PolicyChoice:
    for name in limit_names():
        if name in given:
            check_limit(given[name])
    check_chunks(spec, given)
    threshold = given.get("long_prefill_token_threshold")
    if spec.phases != "mixed" and threshold is not None and threshold.value:
        raise bad(threshold.origin, f"is v1's; policy {spec.name} has phases={spec.phases}")
    return PolicyChoice(spec, given, spelled)
