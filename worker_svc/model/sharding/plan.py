"""How the ranks of a tensor-parallel group divide a model, by transformers' plans of it.

A rank's model is transformers' class with the rank's number of heads, experts and intermediate size, so everything
behind it (probe, cache shape, memory, fused program) sees a smaller model. Both classes are built without weights
first: what the plans say must be what differs between them, else the model is refused.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from worker_svc.model.checkpoint import Checkpoint
from worker_svc.model.sharding.experts import ExpertPart
from worker_svc.model.sharding.refusals import advice, refused
from worker_svc.model.sharding.shard_reader import ShardReader
from worker_svc.model.sharding.shards import WHOLE, Shard, ShardPart

_COLUMNS, _ROWS = "colwise", "rowwise"
_EXPERT_WEIGHTS, _EXPERT_MODULES = "grouped_gemm", "ep_dispatch_experts"
_SAME = "replicated"
_AXES = {_COLUMNS: 0, _ROWS: 1, _EXPERT_WEIGHTS: 0}

Shapes = Mapping[str, torch.Size]
"""Shapes of a model's parameters, by name."""


def sharded(
    found: Checkpoint, cls: type[PreTrainedModel], rank: int, size: int
) -> tuple[Checkpoint, type[PreTrainedModel], Shard]:
    """The checkpoint as one rank reads it, the class of its model, and its parts. As given for a group of one.

    Raises ConfigError for a model without a plan that Quire can follow, and for sizes that `size` does not divide.
    """
    if size == 1:
        return found, cls, WHOLE
    config, whole, plan = _fewer_heads(found, size), _shapes(cls, found.config), _plan_of(found.text_config)
    experts = _expert_part(plan, whole, rank, size)
    own_class = cls if experts is None else experts.class_of(cls)
    own = _shapes(own_class, config)
    if _has_whole_rows(plan, whole, own):
        text = config.get_text_config(decoder=True)
        text.intermediate_size = _size(text, "intermediate_size", size) // size
        own = _shapes(own_class, config)
    kv_heads = getattr(found.text_config, "num_key_value_heads", None) or found.text_config.num_attention_heads
    parts = tuple(_parts(cls, plan, whole, own, rank, size, min(size, kv_heads)))
    shard = Shard(rank, size, parts, experts)
    _check_rest(cls, shard, whole, own)
    num_elements = sum(shape.numel() for shape in own.values())
    reader = ShardReader(found, shard, num_elements)
    return replace(found, config=config, reader=reader), own_class, shard


def _plan_of(config: PreTrainedConfig) -> dict[str, str]:
    """Styles by pattern of modules and parameters. Experts are divided as a whole where there is a plan for that."""
    plans = (getattr(config, name, None) or {} for name in ("base_model_tp_plan", "base_model_ep_plan"))
    return {entry: style for plan in plans for entry, style in plan.items()}


def _pattern_of(entry: str) -> re.Pattern[str]:
    return re.compile(r"(?:^|\.)" + re.escape(entry).replace(r"\*", r"\d+") + r"(?:\.weight|\.bias)?$")


def _fewer_heads(found: Checkpoint, size: int) -> PreTrainedConfig:
    """The configuration with a rank's share of heads."""
    config = copy.deepcopy(found.config)
    text = config.get_text_config(decoder=True)
    if getattr(text, "is_heterogeneous", False):
        raise refused("the model's layers differ in the sizes of their heads; serve it with one rank")
    heads = _size(text, "num_attention_heads", size)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    if kv_heads % size and size % kv_heads:
        raise refused(
            f"{size} ranks neither divide the model's {kv_heads} key-value heads nor are a multiple of them; "
            f"use {advice(kv_heads)}",
            num_key_value_heads=str(kv_heads),
        )
    if getattr(text, "head_dim", None) is None:
        text.head_dim = text.hidden_size // heads
    text.num_attention_heads = heads // size
    text.num_key_value_heads = max(1, kv_heads // size)
    return config


def _size(config: PreTrainedConfig, field: str, size: int) -> int:
    value = getattr(config, field, None)
    if not isinstance(value, int):
        raise refused(f"the model's configuration has no number {field} to divide", field=field)
    if value % size:
        raise refused(f"{size} ranks do not divide the model's {field} of {value}; use {advice(value)}", field=field)
    return value


def _shapes(cls: type[PreTrainedModel], config: PreTrainedConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = cls(copy.deepcopy(config))
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _has_whole_rows(plan: Mapping[str, str], whole: Shapes, own: Shapes) -> bool:
    """True if a module that the plan divides by its inputs has all of them: those do not follow the number of heads."""
    rows = [_pattern_of(entry) for entry, style in plan.items() if style == _ROWS]
    return any(own.get(name) == whole[name] for name in whole for row in rows if whole[name][1:] and row.search(name))


def _expert_part(plan: Mapping[str, str], shapes: Shapes, rank: int, size: int) -> ExpertPart | None:
    """The experts of a rank by `plan`, of a model with parameters of these `shapes`; None if it has no experts.

    Raises ConfigError if `size` does not divide their number.
    """
    entries = [entry for entry, style in plan.items() if style == _EXPERT_WEIGHTS]
    modules = [entry for entry, style in plan.items() if style == _EXPERT_MODULES]
    counts = {shape[0] for name, shape in shapes.items() if any(_pattern_of(e).search(name) for e in entries)}
    if not counts or not modules:
        return None
    if undivided := [count for count in sorted(counts) if count % size]:
        total = undivided[0]
        raise refused(
            f"{size} ranks do not divide the model's {total} experts; use {advice(total)}", num_experts=str(total)
        )
    if len(counts) > 1 or len(modules) > 1:
        raise refused(f"the model's layers have different experts: {sorted(counts)} of them, in {', '.join(modules)}")
    count, [module] = counts.pop() // size, modules
    return ExpertPart(
        modules=_pattern_of(module),
        weights=tuple(entry.rpartition(".")[2] for entry in entries),
        stored=re.compile(rf"\.{re.escape(module.rpartition('.')[2])}\.(\d+)\."),
        first=rank * count,
        count=count,
    )


def _parts(
    cls: type[PreTrainedModel],
    plan: Mapping[str, str],
    whole: Shapes,
    own: Shapes,
    rank: int,
    size: int,
    kv_parts: int,
) -> Iterator[tuple[re.Pattern[str], ShardPart]]:
    """The plan's entries for modules that are divided. `kv_parts`: distinct parts of the key-value heads."""
    for entry, style in plan.items():
        pattern = _pattern_of(entry)
        names = [name for name in whole if pattern.search(name)]
        if not names or style.startswith(_SAME):
            continue
        if style not in _AXES:
            raise refused(
                f"{cls.__name__} has {entry}, which transformers divides as {style!r}; only {', '.join(_AXES)} are supported",
                module=entry,
            )
        axis = _AXES[style]
        counts = {_count(name, whole[name], own[name], axis) for name in names if whole[name][axis:]}
        # Key-value heads may be on several ranks; nothing else may, as it would be summed several times.
        if len(counts) != 1 or not counts <= {size, *((kv_parts,) if axis == 0 else ())}:
            raise refused(f"{cls.__name__} does not divide {entry} by its numbers of heads", module=entry)
        count = counts.pop() or 1
        yield pattern, ShardPart(axis, rank * count // size, count, rank == 0)


def _count(name: str, whole: torch.Size, own: torch.Size, axis: int) -> int | None:
    """How many ranks' shapes make up the whole along `axis`; None if they differ elsewhere."""
    same = whole[:axis] == own[:axis] and whole[axis + 1 :] == own[axis + 1 :]
    return whole[axis] // own[axis] if same and own[axis] and whole[axis] % own[axis] == 0 else None


def _check_rest(cls: type[PreTrainedModel], shard: Shard, whole: Shapes, own: Shapes) -> None:
    """Raise ConfigError if a parameter that is not divided has another shape, or if nothing is summed."""
    if whole.keys() != own.keys():
        raise refused(f"{cls.__name__} has other modules with fewer heads")
    for name, shape in whole.items():
        if shard.of(name) is None and own[name] != shape:
            raise refused(
                f"{cls.__name__} cannot be divided: transformers' plan does not say how to divide {name}, which has shape "
                f"{tuple(shape)} and {tuple(own[name])} with a rank's numbers of heads",
                module=name,
            )
    if not any(part.axis == 1 for _, part in shard.parts):
        raise refused(f"transformers has no tensor-parallel plan for {cls.__name__}; serve it with one rank")
