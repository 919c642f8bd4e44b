"""Keys of `--set KEY=VALUE` and policy files, and the checks of their values.

A key is a field of `PolicySpec` (parts and their settings), a field of `CoreLimits`, or a switch that sets several.
Names may be dotted (`part.key`). `policy.file` reads files; `policy.assembly` combines keys.
"""

import difflib
import math
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

import yaml

from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.spec.policy_spec import PolicySpec, as_written, knob_names
from svc_common.errors import ConfigError

ASYNC = "async"
CHUNKED_PREFILL = "chunked_prefill"
CACHE_TYPE = "cache_type"
# Chitu's names. All of Chitu's blocks are usable; here one more is needed, the null block.
ALIASES = {
    "scheduler.type": "scheduler_type",
    "scheduler.pp_config.prefill_num_tasks_divided_by_pp": "prefill_num_tasks_divided_by_pp",
    "scheduler.pp_config.prefill_num_tasks": "prefill_num_tasks",
    "scheduler.pp_config.enforce_decode_num_tasks_max": "enforce_decode_num_tasks_max",
    "scheduler.pp_config.decode_num_tasks": "decode_num_tasks",
    "infer.max_reqs": "max_reqs",
    "infer.pp_size": "pp_size",
    "infer.dp_size": "dp_size",
    "infer.cache_type": CACHE_TYPE,
    "infer.prefill_chunk_size": "prefill_chunk_size",
    "infer.num_blocks": "num_gpu_blocks",
    "infer.block_size": "block_size",
}
_NOT_KEYS = ("cache_windows", "num_state_blocks", "checkpoint_tokens", "max_granted_steps")
_WITHOUT_NULL_BLOCK = "infer.num_blocks"
_LEAST = {"num_gpu_blocks": 2, "num_cpu_blocks": 0, "long_prefill_token_threshold": 0}
_MOST = 2**31 - 1
_NUM_CLOSE = 3
_MAX_ORIGIN = 200


@dataclass(frozen=True, slots=True)
class Assignment:
    """One key with its value. `origin`: where it was written, as the beginning of an error message."""

    key: str
    value: Any
    origin: str


def limit_names() -> list[str]:
    """Fields of `CoreLimits` that are keys; grants are a setting of the service, cache groups and states the model's."""
    return [field.name for field in fields(CoreLimits) if field.name not in _NOT_KEYS]


def known_keys() -> list[str]:
    """All keys, sorted."""
    return sorted({*knob_names(), *limit_names(), ASYNC, CACHE_TYPE})


def from_texts(texts: Iterable[str], option: str) -> list[Assignment]:
    """Parse `["delay_factor=0.5", ...]`; values are YAML scalars. Raises ConfigError, with the origin `option`, for other texts."""
    return [_from_text(text, option) for text in texts]


def _from_text(text: str, option: str) -> Assignment:
    key, equals, value = text.partition("=")
    origin = f"{option} {text}"
    if not equals or not key.strip():
        raise bad(origin, "is no KEY=VALUE; write for example preemption_mode=swap")
    try:
        for what, _ in references(value):
            raise bad(origin, f"{what}; write the value itself")
        return Assignment(key.strip(), yaml.safe_load(value), origin)
    except yaml.YAMLError:
        raise bad(origin, f"{value!r} is no value; write a number, a word, true, false or null") from None
    except (ValueError, OverflowError, RecursionError):
        raise bad(_short(origin), "the value cannot be read; is it a number of too many digits?") from None


def references(text: str) -> Iterator[tuple[str, int]]:
    """YAML aliases and tags in `text` as (description, line from 1). Raises YAMLError if it is not YAML."""
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            yield f"*{event.anchor} is a YAML alias, which policies do not have", event.start_mark.line + 1
        elif tag := getattr(event, "tag", None):
            name = tag.replace("tag:yaml.org,2002:", "!!")
            yield f"{name} is a YAML tag, which policies do not have", event.start_mark.line + 1


def checked(assignment: Assignment) -> Assignment:
    """The assignment with its value in the key's type and Chitu's names replaced.

    Raises ConfigError for a wrong type or an unknown key, with similar keys.
    """
    if assignment.key in ALIASES:
        ours = checked(Assignment(ALIASES[assignment.key], assignment.value, assignment.origin))
        return Assignment(ours.key, ours.value + 1, ours.origin) if assignment.key == _WITHOUT_NULL_BLOCK else ours
    key, value = assignment.key, assignment.value
    if key not in known_keys():
        raise bad(assignment.origin, _unknown(key), field=key)
    kinds = _kinds(key)
    if str in kinds:
        return assignment  # the spec knows the words
    for kind in kinds:
        if (taken := _TAKEN_AS[kind](value)) is not None:
            _check_most(assignment)
            return Assignment(key, taken[0], assignment.origin)
    allowed = " or ".join(_MEANINGS[kind] for kind in kinds)
    _check_most(assignment)
    raise bad(assignment.origin, f"{key} must be {allowed}, not {as_written(value)}", field=key)


def check_limit(assignment: Assignment) -> None:
    """Raise ConfigError for a limit that is too small or too large."""
    _check_most(assignment)
    least = _LEAST.get(assignment.key, 1)
    if not isinstance(assignment.value, bool) and assignment.value < least:
        raise bad(assignment.origin, f"{assignment.key} must be at least {least}", field=assignment.key)


def close_to(word: str, known: Iterable[str]) -> str:
    """Suggestion of similar words, " (did you mean a or b?)", or "" if there are none."""
    close = difflib.get_close_matches(word, list(known), _NUM_CLOSE)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def bad(origin: str, why: str, *, field: str = "") -> ConfigError:
    """A ConfigError: where, then what is wrong."""
    return ConfigError(f"{origin}: {why}", reason="BAD_POLICY", metadata={"field": field} if field else None)


def _check_most(assignment: Assignment) -> None:
    """Raise ConfigError for numbers that do not fit the services' messages and cannot always be printed."""
    if isinstance(assignment.value, int) and abs(assignment.value) > _MOST:
        raise bad(_short(assignment.origin), f"{assignment.key} must be at most {_MOST}", field=assignment.key)


def _short(origin: str) -> str:
    return origin if len(origin) <= _MAX_ORIGIN else f"{origin[:_MAX_ORIGIN]}..."


def _unknown(key: str) -> str:
    return f"unknown key {key!r}{close_to(key, [*known_keys(), *ALIASES])}; there are: {', '.join(known_keys())}"


def _kinds(key: str) -> tuple[type, ...]:
    """Types that the key's value may have."""
    if key == ASYNC:
        return (bool,)
    if key == CACHE_TYPE:
        return (str,)
    hint = get_type_hints(PolicySpec if key in knob_names() else CoreLimits)[key]
    return get_args(hint) or (hint,)


def _as_bool(value: Any) -> tuple[bool] | None:
    return (value,) if isinstance(value, bool) else None


def _as_int(value: Any) -> tuple[int] | None:
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else None


def _as_float(value: Any) -> tuple[float] | None:
    """Converts also what YAML 1.1 reads as a word: 1e-1."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return (number,) if math.isfinite(number) else None


def _as_none(value: Any) -> tuple[None] | None:
    return (None,) if value is None else None


_TAKEN_AS: dict[type, Callable[[Any], tuple[Any] | None]] = {
    bool: _as_bool,
    int: _as_int,
    float: _as_float,
    types.NoneType: _as_none,
}
_MEANINGS = {bool: "true or false", int: "a whole number", float: "a number", types.NoneType: "null"}
