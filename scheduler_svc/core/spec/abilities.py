"""What the parts of a policy offer and need, and which of them read a setting.

A part is a key with a value. It is refused if no other part offers an ability that it needs; a setting that no
part reads is refused where it is given, and null in listings. Abilities are phrases: error messages quote them.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

from scheduler_svc.core.spec.task_settings import task_keys

_ON: Any = object()
"""Stands for all values of a key but its default."""
_ANY: Any = object()
"""Marks a setting that has no value that means "not used"."""


@dataclass(frozen=True, slots=True)
class Part:
    """Abilities that a part needs, and those that it adds."""

    needs: tuple[str, ...] = ()
    offers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that is read if all of `needs` are offered. `off`: the value that means that nothing reads it."""

    off: Any
    needs: tuple[str, ...]


def _on(*needs: str, offers: tuple[str, ...] = ()) -> dict[Any, Part]:
    """A key of which all values but the default need and offer the same."""
    return {_ON: Part(needs, offers)}


_V0 = (
    "steps of v0",
    "a waiting queue",
    "groups of a request",
    "a choice of cache rules",
    "swap",
    "adapter slots",
    "recorded defects",
)
_MIXED = (
    "mixed steps",
    "a waiting queue",
    "groups of a request",
    "groups of a sample",
    "a choice of cache rules",
    "cached prompt tokens",
)
_TASKS = ("tasks", "groups of a sample", "cached prompt tokens", "recorded defects")
_PREFILLS = ("batch sizes", "several plans", "prefills by pp_size")
_DECODES = ("batch sizes", "several plans", "decodes by pp_size")
_BLOCKS = ("blocks", "a watermark", "host blocks")

PARTS: Mapping[str, Mapping[Any, Part]] = {
    **{key: _on("tasks") for key in task_keys()},
    "dp_size": _on("ranks"),
    "dp_prefix_affinity": _on("ranks"),
    "num_scheduler_groups": _on("scheduler groups"),
    "pp_size": _on("tasks", offers=("several plans",)),
    "max_prefill_tasks": {None: Part(offers=("prefills by pp_size",)), **_on("tasks")},
    "max_decode_tasks": {None: Part(offers=("decodes by pp_size",)), **_on("tasks")},
    "prefill_num_tasks_divided_by_pp": {False: Part(("tasks",), ("a given number of prefills",))},
    "enforce_decode_num_tasks_max": {False: Part(("tasks",), ("a given number of decodes",))},
    "phases": {
        "prefill_or_decode": Part(offers=(*_V0, "whole prompts", "a sorted queue")),
        "decode_then_prefill": Part(offers=(*_V0, "chunks of whole blocks")),
        "mixed": Part(offers=(*_MIXED, "a sorted queue", "adapter slots")),
        "scored": Part(offers=(*_TASKS, "scorers", "scheduler groups", "batch sizes")),
        "skew": Part(offers=(*_TASKS, "scorers", "scheduler groups", "cache slots", "reserved blocks")),
        "ranks": Part(offers=(*_TASKS, "ranks", "reserved blocks")),
    },
    "progress": {
        "after_result": Part(("steps of v0",)),
        "at_schedule": Part(("mixed steps",)),
        "placeholders": Part(("mixed steps",), ("placeholders",)),
        "one_under_way": Part(("tasks",)),
    },
    "cache": {
        "vllm_2023": Part(("steps of v0",), _BLOCKS),
        "vllm_063": Part(("steps of v0",), (*_BLOCKS, "lookahead slots")),
        "v1_pool": Part(("cached prompt tokens",), ("blocks", "a device pool", "cache groups")),
        "quire": Part(("a choice of cache rules",), (*_BLOCKS, "lookahead slots", "a device pool", "cache groups")),
        "none": Part(("a choice of cache rules",), ("lookahead slots",)),
    },
    "grouping": {"request": Part(("groups of a request",)), "sample": Part(("groups of a sample",))},
    "batching": {"continuous": Part(), "static": Part(("mixed steps",))},
    "policy": {
        "fcfs": Part(),
        "priority": Part(("a waiting queue",)),
        "aged": Part(("mixed steps",), ("start times", "costs of steps", "costs of tokens")),
    },
    "victims": {
        "by_order": Part(),
        "least_lost": Part(("mixed steps",), ("victims by loss", "swap", "costs of tokens")),
    },
    "restraint": {
        None: Part(),
        "expected_peak": Part(("mixed steps", "blocks"), ("a forecast of blocks", "costs of tokens")),
    },
    "preemption_mode": {
        None: Part(offers=("preemption by swap",)),
        "recompute": Part(),
        "swap": Part(("swap", "host blocks"), ("preemption by swap",)),
    },
    "defects": {"repaired": Part(), "recorded": Part()},
    "makes_way": _on("start times", "victims by loss", "blocks", offers=("room for the head",)),
    "chunk_s": _on("mixed steps", offers=("costs of steps", "costs of tokens")),
    "deadlines": _on("mixed steps", offers=("costs of steps", "costs of tokens")),
    "tenant_fairness": _on("mixed steps"),
    "placement": {"prefix_affinity": Part(), "least_work": Part(), "round_robin": Part()},
    "batch_queue": _on("mixed steps"),
    "num_spec_tokens": _on("mixed steps"),
    "async_output": _on("steps of v0"),
    "delay_factor": _on("steps of v0"),
    "num_lookahead_slots": _on("steps of v0", "lookahead slots"),
    "num_scheduler_steps": _on("steps of v0"),
    "max_loras": _on("adapter slots"),
    "watermark_blocks": _on("a watermark"),
    "sliding_window": {None: Part(offers=("the whole context",)), **_on("blocks")},
}
"""Parts by key and value. A key with words as values takes no others."""

SETTINGS: Mapping[str, Setting] = {
    **{key: Setting(None, ("tasks",)) for key in ("max_reqs", "prefill_chunk_size", "num_scheduler_groups")},
    **{key: Setting(None, ("batch sizes",)) for key in ("max_prefill_tasks", "max_decode_tasks")},
    "policy": Setting("fcfs", ("a sorted queue",)),
    "patience_s": Setting(_ANY, ("start times",)),
    "margin_s": Setting(_ANY, ("room for the head",)),
    "caution": Setting(_ANY, ("a forecast of blocks",)),
    "step_s": Setting(0.0, ("costs of steps",)),
    "compute_token_s": Setting(0.0, ("costs of tokens",)),
    "swap_block_s": Setting(0.0, ("victims by loss", "host blocks", "preemption by swap")),
    "fast_path": Setting(False, ("mixed steps", "a device pool", "the whole context")),
    "defects": Setting("repaired", ("recorded defects",)),
    "scheduler_type": Setting("", ("scorers",)),
    "pp_size": Setting(1, ("scheduler groups",)),
    "dp_size": Setting(1, ("ranks",)),
    "dp_prefix_affinity": Setting(None, ("ranks",)),
    "prefill_num_tasks_divided_by_pp": Setting(True, _PREFILLS),
    "enforce_decode_num_tasks_max": Setting(True, _DECODES),
    "prefill_num_tasks": Setting(None, (*_PREFILLS, "a given number of prefills")),
    "decode_num_tasks": Setting(None, (*_DECODES, "a given number of decodes")),
}
"""Settings that parts read, by key."""


def choices(key: str) -> list[Any]:
    """The words that a key takes; empty for a key with other values."""
    values = PARTS.get(key, {})
    return [] if _ON in values or False in values else list(values)


def offers_of(key: str, value: Any) -> tuple[str, ...]:
    """Abilities that a key offers with that value, which is not its default unless it is a word."""
    return _part(key, value, default=_ON).offers


def offered(spec: Any) -> frozenset[str]:
    """Abilities that all parts of a spec offer together."""
    kind: Any = type(spec)
    return _offered(kind, _part_values(spec))


@lru_cache(maxsize=256)
def _offered(kind: Any, values: tuple[Any, ...]) -> frozenset[str]:
    return frozenset(ability for _, part in _parts(kind, values) for ability in part.offers)


def contradictions(spec: Any) -> list[tuple[str, str]]:
    """(key, reason) for every part that needs what no other part offers."""
    have, parts = offered(spec), _parts(type(spec), _part_values(spec))
    return [(key, why + _instead(key, have)) for key, part in parts if (why := lack(part.needs, have))]


def unread_settings(spec: Any) -> dict[str, str]:
    """Settings that no part reads, each with the reason."""
    have = offered(spec)
    return {key: why for key, setting in SETTINGS.items() if (why := lack(setting.needs, have))}


def lack(needs: Iterable[str], have: Collection[str]) -> str:
    """What is missing and which parts offer it; "" if nothing is."""
    return "; ".join(f"needs {ability} ({_sources(ability)})" for ability in needs if ability not in have)


_part_values = attrgetter(*PARTS)


def _parts(kind: Any, values: tuple[Any, ...]) -> list[tuple[str, Part]]:
    defaults = kind.__dataclass_fields__
    return [(key, _part(key, value, defaults[key].default)) for key, value in zip(PARTS, values, strict=True)]


def _part(key: str, value: Any, default: Any) -> Part:
    other = Part() if value == default else PARTS[key].get(_ON, Part())
    return next((part for word, part in PARTS[key].items() if word == value), other)


def _sources(ability: str) -> str:
    """The parts that offer an ability, as key=value."""
    offering = {
        key: [_written(value) for value, part in parts.items() if ability in part.offers]
        for key, parts in PARTS.items()
    }
    return ", ".join(f"{key}={' or '.join(values)}" for key, values in offering.items() if values)


def _instead(key: str, have: frozenset[str]) -> str:
    """The words that the key can have with the other parts."""
    can = [_written(value) for value in choices(key) if not lack(PARTS[key][value].needs, have)]
    return f"; with the other parts {key} can be {' or '.join(can)}" if can else ""


def _written(value: Any) -> str:
    return "..." if value is _ON else {None: "null", False: "false"}.get(value, value)
