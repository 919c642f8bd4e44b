"""adapter_config.json of a PEFT adapter: the modules it changes, with rank and scale, and what is refused.

Matching follows PEFT (`LoraConfig`, `check_target_module_exists`, `get_pattern_key`). Uses neither torch nor
files.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from svc_common.errors import FieldViolation, InvalidArgument

ALL_LINEAR = "all-linear"
_SUPPORTED = (
    "Supported are plain LoRA adapters of Linear and Conv1D modules (r, lora_alpha, use_rslora, target_modules, rank_pattern, "
    "alpha_pattern) in adapter_model.safetensors"
)
# Initialisations that change the base model's weights: the adapter alone does not give the trained model.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Fields that, when set, make an adapter other than y + scale * B A x.
_REFUSED = {
    "use_dora": "is DoRA",
    "use_qalora": "is QALoRA",
    "use_bdlora": "is BD-LoRA",
    "arrow_config": "routes among other adapters (Arrow)",
    "kasa_config": "is KaSA",
    "lora_bias": "has biases (lora_bias)",
    "modules_to_save": "replaces whole modules (modules_to_save)",
    "target_parameters": "changes parameters that are not modules (target_parameters)",
    "trainable_token_indices": "changes embeddings (trainable_token_indices)",
    "layer_replication": "replicates layers (layer_replication)",
    "alora_invocation_tokens": "is activated by a token sequence (aLoRA)",
    "ensure_weight_tying": "ties changes of embedding and output (ensure_weight_tying)",
    "megatron_config": "is for Megatron's parallel layers (megatron_config)",
}


def refused(reason: str, what: str, **metadata: str) -> InvalidArgument:
    """The error for a refused adapter folder; `what` follows "path: "."""
    return InvalidArgument(
        f"path: {what}",
        reason=reason,
        violations=[FieldViolation("path", what)],
        metadata={"field": "path", **metadata},
    )


def unsupported(what: str) -> InvalidArgument:
    """The error for an adapter kind that is not supported."""
    return refused("ADAPTER_UNSUPPORTED", f"the adapter {what}. {_SUPPORTED}")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Settings of a plain LoRA adapter from adapter_config.json.

    `targets`, `excluded`: a regular expression for whole module names, or suffixes of names; None = not set.
    """

    rank: int
    alpha: float
    use_rslora: bool
    targets: str | tuple[str, ...] | None
    excluded: str | tuple[str, ...] | None
    layers: frozenset[int]
    """Empty = all."""
    layers_patterns: tuple[str, ...]
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """Rank of a module's matrices."""
        return self.ranks.get(_pattern_for(module, self.ranks), self.rank)

    def scale_of(self, module: str) -> float:
        """Scale factor of a module's change."""
        rank = self.rank_of(module)
        alpha = self.alphas.get(_pattern_for(module, self.alphas), self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    @property
    def is_all_linear(self) -> bool:
        """True if the adapter targets every linear module but the output embedding."""
        return isinstance(self.targets, str) and self.targets.lower() == ALL_LINEAR

    def may_change(self, module: str) -> bool:
        """True if the configuration targets a module of this name, or does not set any targets."""
        if self.excluded is not None and _matches(module, self.excluded):
            return False
        if self.targets is None or self.is_all_linear:
            return True
        if isinstance(self.targets, str) or module in self.targets:
            return _matches(module, self.targets)
        return _matches(module, self.targets) and self._in_layers(module)

    def _in_layers(self, module: str) -> bool:
        if not self.layers:
            return True
        patterns = [rf"(?:^|.*?\.){pattern}" for pattern in self.layers_patterns] or [r".*?\.[^.]*"]
        found = next((m for p in patterns if (m := re.match(rf"{p}\.(?P<layer>\d+)\.", module))), None)
        return found is not None and int(found["layer"]) in self.layers


def _pattern_for(module: str, patterns: Mapping[str, object]) -> str:
    return next((p for p in patterns if re.match(rf"(.*\.)?({p})$", module)), module)


def _matches(module: str, targets: str | tuple[str, ...]) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


# --- reading ---------------------------------------------------------------------------------------------------------


def read_config(raw: Mapping[str, Any]) -> AdapterConfig:
    """Parse the configuration. Raises InvalidArgument saying which field is wrong or not supported."""
    _check_kind(raw)
    config = AdapterConfig(
        rank=_get(raw, "r", 8, "a whole number above 0", _is_count),
        alpha=_get(raw, "lora_alpha", 8, "a number", _is_number),
        use_rslora=bool(raw.get("use_rslora")),
        targets=_names(raw, "target_modules"),
        excluded=_names(raw, "exclude_modules") or None,
        layers=_layers(raw),
        layers_patterns=_patterns(raw),
        ranks=_get(raw, "rank_pattern", {}, "an object of whole numbers above 0", _is_map_of(_is_count)),
        alphas=_get(raw, "alpha_pattern", {}, "an object of numbers", _is_map_of(_is_number)),
    )
    _check_expressions(config)
    return config


def _check_kind(raw: Mapping[str, Any]) -> None:
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise unsupported(f"is of PEFT type {kind!r}, not LORA")
    for field, what in _REFUSED.items():
        if raw.get(field):
            raise unsupported(what)
    if raw.get("bias", "none") != "none":
        raise unsupported(f"was trained with bias={raw['bias']!r}: it changes the base's biases")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise unsupported(
            f"was initialised with init_lora_weights={start!r}, which also changes the base model; save it as plain LoRA "
            "(save_pretrained with path_initial_model_for_weight_conversion)"
        )


def _invalid(field: str, value: object, wanted: str) -> InvalidArgument:
    return refused("ADAPTER_INVALID", f"adapter_config.json has {field} = {value!r}; it must be {wanted}")


def _get(raw: Mapping[str, Any], field: str, default: Any, wanted: str, is_good: Callable[[Any], bool]) -> Any:
    value = raw.get(field)
    if value is None:
        return default
    if not is_good(value):
        raise _invalid(field, value, wanted)
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_map_of(is_good: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(is_good(entry) for entry in value.values())


def _are_names(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _names(raw: Mapping[str, Any], field: str) -> str | tuple[str, ...] | None:
    value = _get(raw, field, None, "a string or a list of strings", _are_names)
    return tuple(value) if isinstance(value, list) else value


def _patterns(raw: Mapping[str, Any]) -> tuple[str, ...]:
    value = _names(raw, "layers_pattern") or ()
    return (value,) if isinstance(value, str) else value


def _layers(raw: Mapping[str, Any]) -> frozenset[int]:
    value = raw.get("layers_to_transform")
    layers = [value] if isinstance(value, int) else value or []
    if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
        raise _invalid("layers_to_transform", value, "a whole number or a list of them")
    return frozenset(layers)


def _check_expressions(config: AdapterConfig) -> None:
    single = {"target_modules": config.targets, "exclude_modules": config.excluded}
    found = [(field, given) for field, given in single.items() if isinstance(given, str)]
    found += [("layers_pattern", pattern) for pattern in config.layers_patterns]
    found += [("rank_pattern", pattern) for pattern in config.ranks]
    found += [("alpha_pattern", pattern) for pattern in config.alphas]
    for field, expression in found:
        try:
            re.compile(expression)
        except re.error as error:
            raise _invalid(field, expression, f"a regular expression ({error})") from None
