"""An operator's choice of policy and limits as one object; limits are complete once the worker's size is known.

`policy.assembly` builds it from names, files and single keys.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from block_manager.hashing import HashRename
from protos.common.v1 import common_pb2
from scheduler_svc.core.composition import presets
from scheduler_svc.core.composition.live_change import LIVE_KNOBS, LIVE_LIMITS, LIVE_TASK_KNOBS
from scheduler_svc.core.limits import CoreLimits, PoolSize
from scheduler_svc.core.policies.chitu.scorers import DECODE_ONLY, PREFILL_ONLY, words_of
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.spec.abilities import SETTINGS, lack, offered, unread_settings
from scheduler_svc.core.spec.policy_spec import PolicySpec, knob_names
from scheduler_svc.policy.keys import ASYNC, CACHE_TYPE, Assignment, bad, check_limit, checked, from_texts, limit_names
from scheduler_svc.policy.lanes import cache_type_of, check_chunks
from svc_common.errors import ConfigError

Spelling = Callable[[str], str]

_DEFAULT_NUM_SEQS = 256
_DEFAULT_BATCHED_TOKENS = 2048
_DEFAULT_CHUNKED_TOKENS = 512
_ANY_NUMBER = 2**31


def refuse_without_effect(spec: PolicySpec, given: Mapping[str, Assignment]) -> None:
    """Raise ConfigError for a given key that the policy does not read."""
    for key, why in unread_settings(spec).items():
        if key in given and given[key].value != SETTINGS[key].off:
            raise bad(given[key].origin, f"has no effect under policy {spec.name}: {why}; leave it out", field=key)


def located(error: ConfigError, given: Mapping[str, Assignment], otherwise: str) -> ConfigError:
    """The error with the origin of the key at fault; `otherwise`: the origin of keys that are not given."""
    wrong = error.metadata.get("field", "")
    origin = given[wrong].origin if wrong in given else otherwise
    what = error.message.removeprefix(f"{origin}: ")
    return ConfigError(f"{origin}: {what}", reason=error.reason, metadata=error.metadata)


@dataclass(frozen=True, slots=True)
class WorkerSize:
    """The sizes of a worker that core limits depend on. `sliding_window`: of all layers of its model, in
    tokens; 0 = some layer has none. The rest: as in `CoreLimits`."""

    block_size: int
    num_gpu_blocks: int
    num_cpu_blocks: int
    max_model_len: int
    sliding_window: int = 0
    cache_windows: Sequence[int] = ()
    num_state_blocks: int = 0
    checkpoint_tokens: int = 0

    @classmethod
    def of(cls, counts: "Counts", limits: common_pb2.ModelLimits) -> "WorkerSize":
        """The sizes of a worker with so many blocks."""
        return cls(
            block_size=counts.block_size,
            num_gpu_blocks=counts.num_gpu_blocks,
            num_cpu_blocks=counts.num_cpu_blocks,
            max_model_len=limits.max_model_len,
            sliding_window=limits.sliding_window,
            cache_windows=limits.cache_windows,
            num_state_blocks=limits.num_state_blocks,
            checkpoint_tokens=limits.checkpoint_tokens,
        )


class Counts(Protocol):
    """What a worker says of its blocks."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    @property
    def num_gpu_blocks(self) -> int:
        """Device blocks, the null block included."""

    @property
    def num_cpu_blocks(self) -> int:
        """Host blocks."""


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A consistent policy, and the given limits with their origins. Limits that are not given follow the worker."""

    spec: PolicySpec
    given: Mapping[str, Assignment] = field(default_factory=dict)
    spelled: Spelling = str

    @classmethod
    def with_limits(cls, spec: PolicySpec, given: Mapping[str, Assignment], spelled: Spelling) -> "PolicyChoice":
        """A choice with checked limits. Raises ConfigError for impossible values and for limits that the policy lacks."""
        for name in limit_names():
            if name in given:
                check_limit(given[name])
        check_chunks(spec, given)
        threshold = given.get("long_prefill_token_threshold")
        if threshold is not None and threshold.value and (why := lack(("mixed steps",), offered(spec))):
            raise bad(threshold.origin, f"{why}; policy {spec.name} has phases={spec.phases}")
        return cls(spec, given, spelled)

    def max_model_len(self, of_worker: int) -> int:
        """The worker's maximum length, or the given one if it is less. Raises ConfigError if it is more."""
        return self._at_most("max_model_len", of_worker, "tokens are what the worker's model takes")

    def largest_step(self, max_model_len: int) -> tuple[int, int]:
        """(tokens, sequences) of the largest step. Raises ConfigError if they contradict each other."""
        tokens = self._limit("max_num_batched_tokens", self._default_tokens(max_model_len))
        seqs = self._limit("max_num_seqs", self._default_seqs(tokens))
        if tokens < seqs:
            raise ConfigError(
                f"{self._named('max_num_batched_tokens')} ({tokens}) must not be less than {self._named('max_num_seqs')} "
                f"({seqs}): every running sequence needs one token per step; raise the first or lower the second",
                reason="BAD_LIMIT",
            )
        return tokens, seqs

    def core_limits(self, worker: WorkerSize) -> CoreLimits:
        """Limits of a core on this worker. Raises ConfigError if they exceed the worker or do not fit the policy."""
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
            cache_windows=tuple(worker.cache_windows),
            num_state_blocks=worker.num_state_blocks,
            checkpoint_tokens=worker.checkpoint_tokens,
            **self._switches(),
        )
        try:
            self.spec.check(limits)
        except ConfigError as error:
            wrong = error.metadata.get("field", "max_num_batched_tokens")
            raise located(error, self.given, self._origin(wrong)) from None
        return limits

    def effective(self) -> dict[str, Any]:
        """All keys with the values that the service uses.

        None if the worker decides, if the value is null, or if the policy does not read the key.
        """
        tokens = self._limit("max_num_batched_tokens", None if self._runs_whole else self._default_tokens(1))
        limits = {name: self._limit(name, None) for name in limit_names()} | self._switches()
        limits |= {
            "max_num_batched_tokens": tokens,
            "max_num_seqs": self._limit("max_num_seqs", self._default_seqs(tokens)),
        }
        unread = unread_settings(self.spec)
        knobs = {name: None if name in unread else getattr(self.spec, name) for name in knob_names()}
        switches = {ASYNC: self.spec.has("placeholders"), CACHE_TYPE: cache_type_of(self.spec)}
        return {**knobs, **switches, **limits}

    def for_model(self, worker: WorkerSize) -> "PolicyChoice":
        """The choice for the worker's model: with its sliding window, if the cache rules can free blocks behind it.

        v0's cache rules cannot with prefix caching; they keep all blocks then.
        """
        frees = self.spec.frees_behind_window(prefix_caching=self._switches()["prefix_caching"])
        if not (worker.sliding_window and frees):
            return self
        return replace(self, spec=replace(self.spec, sliding_window=worker.sliding_window))

    @property
    def has_ranks(self) -> bool:
        """True if workers are ranks, which are planned together, and not worker groups, which are planned one by one."""
        return self.spec.has("ranks")

    def build(self, limits: CoreLimits, pools: Sequence[PoolSize] = (), rename: HashRename | None = None) -> Scheduler:
        """Build the core. `pools`, `rename`: as in `presets.build`."""
        return presets.build(self.spec, limits, pools=pools, rename=rename)

    def changed(self, sets: Iterable[str], option: str) -> "PolicyChoice":
        """The choice with other values for keys that a running core can change.

        Raises ConfigError for other keys; `option` names the origin.
        """
        new = {a.key: a for a in map(checked, from_texts(sets, option))}
        for key, assignment in new.items():
            live = (*(LIVE_TASK_KNOBS if self.spec.schedules_tasks else LIVE_KNOBS), *LIVE_LIMITS)
            if key not in live:
                can = f"what can be changed while the scheduler runs: {', '.join(live)}"
                raise bad(assignment.origin, f"{key} is fixed at start; {can}", field=key)
        knobs = {key: a.value for key, a in new.items() if key in knob_names()}
        try:
            spec = self.spec.with_knobs(**knobs)
        except ConfigError as error:
            raise located(error, new, option) from None
        refuse_without_effect(spec, new)
        return PolicyChoice.with_limits(spec, {**self.given, **new}, self.spelled)

    def check(self) -> None:
        """Raise ConfigError for what is known to be invalid before any worker answers, and for what the service cannot run yet."""
        if self.spec.sliding_window is not None:
            raise bad(self._origin("sliding_window"), "sliding_window is the model's: the worker says it, leave it out")
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
        """Keys that no worker implements yet, or that exist only to reproduce recordings of reference schedulers."""
        spec = self.spec
        rules = (
            ("num_spec_tokens", spec.num_spec_tokens > 0 and not spec.has("placeholders")),
            ("cache", not spec.has("blocks")),
            ("defects", spec.defects == "recorded"),
            ("scheduler_type", not {PREFILL_ONLY, DECODE_ONLY}.isdisjoint(words_of(spec.scheduler_type))),
        )
        return [(knob, getattr(spec, knob)) for knob, wrong in rules if wrong]

    def _default_tokens(self, max_model_len: int) -> int:
        """vLLM's defaults for v0's schedulers, and a constant for the others."""
        if self.spec.has("chunks of whole blocks"):
            return _DEFAULT_CHUNKED_TOKENS
        return max(max_model_len, _DEFAULT_BATCHED_TOKENS) if self._runs_whole else _DEFAULT_BATCHED_TOKENS

    @property
    def _runs_whole(self) -> bool:
        """True if prompts are never split, so that the token budget must cover the model's length."""
        return self.spec.runs_whole(chunked_prefill=self._switches()["chunked_prefill"])

    def _default_seqs(self, tokens: int | None) -> int:
        return _DEFAULT_NUM_SEQS if tokens is None else min(_DEFAULT_NUM_SEQS, tokens)

    def _switches(self) -> dict[str, Any]:
        return {
            "prefix_caching": self._limit("prefix_caching", not self.spec.schedules_tasks),
            "chunked_prefill": self._limit("chunked_prefill", not self.spec.runs_whole(chunked_prefill=True)),
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
        """A limit as the operator spelled it; as an option if it was not given."""
        assignment = self.given.get(limit)
        return assignment.origin.partition("=")[0] if assignment is not None else self.spelled(limit)

    def _origin(self, knob: str) -> str:
        assignment = self.given.get(knob)
        return assignment.origin if assignment is not None else f"{self.spelled('policy')} {self.spec.name}"
