"""Options of `LLM`: their names, their conversion to service settings, and errors that use the Python names.

Not here: the checks themselves (settings of worker and scheduler).
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.sizes import GIB, parse_size
from scheduler_svc.adapter_names import name_problem
from svc_common.errors import ConfigError

SCHEDULING = ("policy", "policy_set", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")
MEMORY = ("kv_cache_memory", "swap_space")
WORKER = (
    *("served_model_name", "dtype", "kv_cache_dtype", "max_model_len", "block_size", "gpu_memory_utilization"),
    *("num_gpu_blocks_override", "backend", "device", "invariant", "num_threads", "max_adapters", "max_adapter_rank"),
    *("quantization", "quantization_group", "fuse", "weight_cache", "cache_groups", "latent_cache", "mask_budget_ms"),
    *("attention_backend", "checkpoint_tokens", "draft_model", "drafts"),
)
ALWAYS = ("model", "target", "seed", "adapters", "log_steps")

# Service errors name options as on the command line; a value after an option becomes an assignment here.
_OPTION = re.compile(r"(?<![\w/.-])--(?P<name>[a-z]+(?:-[a-z]+)*)(?P<value> (?=\d|cpu\b))?")
_OUR_NAMES = {"kv_cache_memory_bytes": "kv_cache_memory", "swap_space_gib": "swap_space"}


def refuse_unknown(given: Mapping[str, Any]) -> None:
    """Raise ConfigError naming the entries of `given` that are not worker options, and listing all options."""
    unknown = sorted(set(given) - set(WORKER))
    if unknown:
        known = ", ".join(sorted([*ALWAYS, *SCHEDULING, *MEMORY, *WORKER]))
        many = "options" if len(unknown) > 1 else "option"
        raise ConfigError(f"unknown {many} {', '.join(unknown)}; there are: {known}", reason="INVALID_SETTING")


def refuse_with_target(given: Mapping[str, Any]) -> None:
    """Raise ConfigError naming the options given, which behind a gateway only its operator can set."""
    names = sorted(name for name, value in given.items() if value is not None)
    if names:
        raise ConfigError(
            f"{', '.join(names)}: settings of an engine in this process; with target=, give them to `quire up`",
            reason="NOT_WITH_TARGET",
        )


def memory_values(kv_cache_memory: int | str | None, swap_space: float | str | None) -> dict[str, Any]:
    """WorkerSettings fields for the two sizes. Raises ConfigError for an invalid size."""
    values: dict[str, Any] = {}
    if kv_cache_memory is not None:
        values["kv_cache_memory_bytes"] = parse_size(str(kv_cache_memory), "kv_cache_memory")
    if swap_space is not None:
        values["swap_space_gib"] = parse_size(str(swap_space), "swap_space", plain_unit=GIB) / GIB
    return values


def adapter_folders(adapters: Mapping[str, str | Path] | None) -> dict[str, str]:
    """Folders by name. Raises ConfigError unless it is a mapping of names to folders.

    The folders themselves are checked when they are loaded.
    """
    if adapters is None:
        return {}
    if not isinstance(adapters, Mapping) or not all(isinstance(name, str) for name in adapters):
        raise ConfigError('adapters: write {"sql": "/adapters/sql"}', reason="INVALID_SETTING")
    for name in adapters:
        if problem := name_problem(name):
            raise ConfigError(f"adapters: the name {name!r} {problem}", reason="INVALID_SETTING")
    return {name: str(path) for name, path in adapters.items()}


def policy_values(given: Sequence[str] | Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """Field `policy_set` of SchedulerSettings. Raises ConfigError for what is neither KEY=VALUE texts nor a mapping."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        return tuple(f"{key}={json.dumps(value, default=str)}" for key, value in given.items())
    if isinstance(given, str) or not all(isinstance(text, str) for text in given):
        raise ConfigError(
            'policy_set: write ["preemption_mode=swap"] or {"preemption_mode": "swap"}', reason="INVALID_SETTING"
        )
    return tuple(given)


@contextlib.contextmanager
def named_as_in_python() -> Iterator[None]:
    """Rewrite `--max-model-len 64` in ConfigErrors as `max_model_len=64`."""
    try:
        yield
    except ConfigError as error:
        message = _OPTION.sub(_python_name, error.message)
        raise ConfigError(
            message, reason=error.reason, metadata=error.metadata, violations=error.violations
        ) from error.__cause__


def _python_name(found: re.Match[str]) -> str:
    name = found["name"].replace("-", "_")
    return _OUR_NAMES.get(name, name) + ("=" if found["value"] else "")
