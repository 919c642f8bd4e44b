"""Checks which models can be served: decoders in which every token mixer is attention through AttentionInterface, or has states
in transformers' cache.

No layer may look across sequences. Errors name the module at fault. Class and configuration are checked
before weights are read; a probe (`attention.py`) then records whether every layer really reaches attention,
and its findings are judged here.
"""

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

from paged_kernels.backend import CacheShape
from svc_common.errors import ConfigError
from worker_svc.model.attention import LayerCall
from worker_svc.model.checkpoint import Checkpoint

_MIXER = re.compile(r"attn|attention|mixer|mamba|ssm|rwkv|recurrent|temporal|conv|linear_att", re.IGNORECASE)
_NO_MIXER = re.compile(r"norm|mlp|dropout", re.IGNORECASE)
_STATE_TYPES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", *_STATE_TYPES, "moe", "mlp"}
# Fields that change attention in ways that never reach the attention function.
_UNSEEN_FIELDS = {"use_bidirectional_attention": (None, False, "vision")}
"""With the values that leave text causal."""


def unsupported(what: str, *, module: str = "") -> ConfigError:
    """ConfigError for a model that cannot be served; `module` is the one at fault."""
    return ConfigError(
        f"{what}. Supported are decoders in which layers use attention through transformers' AttentionInterface (Llama, Qwen2 "
        "and 3, Mistral, Gemma, Phi-3, GPT-2, GPT-NeoX, OPT, Mixtral, Qwen-MoE, ...), or some of them states in its cache "
        "(Qwen3-Next, Nemotron-H, Granite 4, LFM2, Falcon-H1, ...)",
        reason="MODEL_UNSUPPORTED",
        metadata={"module": module},
    )


def check_class(checkpoint: Checkpoint, cls: type[PreTrainedModel]) -> None:
    """Raise ConfigError if the class or configuration cannot be served. Loads no weights."""
    config = checkpoint.text_config
    if getattr(checkpoint.config, "is_encoder_decoder", False):
        raise unsupported(f"{cls.__name__} is an encoder-decoder model, not a decoder", module=cls.__name__)
    needed = {"position_ids", "logits_to_keep"} - set(inspect.signature(cls.forward).parameters)
    # Classes with states say that they do not, because of their state modules; a probe shows what attention does.
    has_states = getattr(cls, "_is_stateful", False) and not needed
    if not (getattr(cls, "_supports_attention_backend", False) or has_states):
        name, kind = _mixer(_skeleton(cls, checkpoint.config), config, layer=0)
        raise unsupported(
            f"{cls.__name__} cannot be served: its module {name} ({kind}) is not attention through AttentionInterface",
            module=name,
        )
    if needed:
        raise unsupported(
            f"{cls.__name__} cannot be served: its forward() has no parameter {', '.join(sorted(needed))}"
        )
    _check_config(cls, config, checkpoint.config)


def _check_config(cls: type[PreTrainedModel], config: PreTrainedConfig, whole: PreTrainedConfig) -> None:
    layer_types = list(getattr(config, "layer_types", None) or ())
    strange = sorted(set(layer_types) - _LAYER_TYPES)
    if strange:
        name, kind = _mixer(_skeleton(cls, whole), config, layer=layer_types.index(strange[0]))
        raise unsupported(
            f"{cls.__name__} cannot be served: it has layers of type {', '.join(strange)}, for example module {name} ({kind})",
            module=name,
        )
    for field, known in _UNSEEN_FIELDS.items():
        if getattr(config, field, None) not in known:
            raise unsupported(f"{cls.__name__} cannot be served: its configuration sets {field}", module=field)
    for rope in rope_settings(config):
        if "dynamic" in str(rope.get("rope_type", "")):
            raise unsupported(
                f"{cls.__name__} cannot be served with rotary scaling 'dynamic': it depends on the longest sequence of a "
                "batch. Set another rope_type in config.json (yarn, linear, llama3) or remove the scaling"
            )


def may_have_states(cls: type[PreTrainedModel], config: PreTrainedConfig) -> bool:
    """True if the class says that it has, or its configuration has such layers. A probe finds out whether it does."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return bool(getattr(cls, "_is_stateful", False)) or not _STATE_TYPES.isdisjoint(kinds)


def check_one_rank(cls: type[PreTrainedModel], config: PreTrainedConfig, num_ranks: int) -> None:
    """Raise ConfigError if a model that may have states is to be divided over ranks."""
    if num_ranks > 1 and may_have_states(cls, config):
        raise ConfigError(
            f"{cls.__name__} has layers with states of sequences, which are not divided over ranks yet: serve it without "
            "--tensor-parallel and --pipeline-parallel",
            reason="MODEL_UNSUPPORTED",
        )


def rope_settings(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Rotary parameter sets: one, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    sets = [parameters, *parameters.values()]
    return [entry for entry in sets if isinstance(entry, dict)]


def _skeleton(cls: type[PreTrainedModel], config: PreTrainedConfig) -> nn.Module:
    """The class without weights. It may be of the text half of what `config` describes."""
    with torch.device("meta"):
        return cls(config if isinstance(config, cls.config_class) else config.get_text_config(decoder=True))


def _mixer(model: nn.Module, config: PreTrainedConfig, layer: int) -> tuple[str, str]:
    """Name and class of the module that mixes tokens in a decoder layer, guessed from module names."""
    count = getattr(config, "num_hidden_layers", 0)
    for prefix, layers in model.named_modules():
        if isinstance(layers, nn.ModuleList) and len(layers) == count:
            children = list(layers[layer].named_children())
            for name, child in children:
                words = f"{name} {type(child).__name__}"
                if _MIXER.search(words) and not _NO_MIXER.search(words):
                    return f"{prefix}.{layer}.{name}", type(child).__name__
            return f"{prefix}.{layer}", type(layers[layer]).__name__
    return type(model).__name__, type(model).__name__


def check_hidden(model: PreTrainedModel, hidden_size: int) -> None:
    """Raise ConfigError if the probe saw no last hidden states (`hidden_size` 0), which embeddings are made from."""
    if not hidden_size:
        raise unsupported(
            f"{type(model).__name__} cannot be served: its last hidden states are not the output of its decoder"
        )


def probed(model: PreTrainedModel, probe: Callable[[], list[LayerCall]]) -> list[LayerCall]:
    """The calls of a probe. Raises ConfigError if the model asks its cache for what transformers' own layers do not."""
    try:
        return probe()
    except AttributeError as error:
        if not isinstance(error.obj, Cache):
            raise
        raise unsupported(f"{type(model).__name__} cannot be served: its cache must have {error.name}") from error


def check_apart(model: PreTrainedModel, mixes_tokens: Callable[[], bool]) -> None:
    """Raise ConfigError if tokens depend on each other by more than attention and states, as `mixes_tokens` finds out."""
    if mixes_tokens():
        kind = type(model).__name__
        raise unsupported(f"{kind} cannot be served: its tokens depend on each other beside attention and states")


def sliding_window(calls: Sequence[LayerCall]) -> int:
    """Largest sliding window of all layers, from a probe's calls; 0 if any layer attends to the whole sequence.

    A chunk counts as a window of its size, which is never less than what its tokens see.
    """
    windows = [call.window for call in calls]
    return 0 if None in windows else max((window for window in windows if window is not None), default=0)


def check_calls(
    model: PreTrainedModel,
    config: PreTrainedConfig,
    calls: Sequence[LayerCall],
    layers: range,
    *,
    block_size: int,
    max_model_len: int,
    state_layers: Collection[int] = (),
) -> dict[int, CacheShape]:
    """Shapes of the caches of those of these layers that have keys and values of their own, derived from a probe's calls.

    `state_layers`: which have states. Beside such, others may have neither states nor attention: see `check_apart`.

    Raises ConfigError if a layer was not reached exactly once, or if a call cannot be served.
    """
    kind = type(model).__name__
    reached = [call.layer for call in calls]
    if state_layers and not reached:
        raise unsupported(f"{kind} cannot be served: it has layers with states alone, and none with attention")
    shared = next((call for call in calls if call.layer not in layers), None)
    if state_layers and shared is not None:
        raise unsupported(
            f"{kind} cannot be served: its {shared.module} is attention of no layer of its own", module=shared.module
        )
    for layer in layers:
        if reached.count(layer) != 1 and not (state_layers and layer not in reached):
            name, mixer = _mixer(model, config, layer)
            raise unsupported(
                f"{kind} cannot be served: its module {name} ({mixer}) called attention through AttentionInterface "
                f"{reached.count(layer)} times instead of once",
                module=name,
            )
    kept = _kept_tokens(config)
    for call in calls:
        problem = call.problem or _cache_problem(call, kept[call.layer], max_model_len) or _source_problem(call, calls)
        if problem:
            raise unsupported(
                f"{kind} cannot be served: {call.module} of layer {call.layer} {problem}", module=call.module
            )
    return {
        call.layer: CacheShape(block_size, call.num_kv_heads, call.head_dim) for call in calls if call.source is None
    }


def _source_problem(call: LayerCall, calls: Sequence[LayerCall]) -> str:
    """Why a layer cannot read the keys and values of an earlier one, which frees blocks by its own rule; empty if it can."""
    source = next((one for one in calls if one.layer == call.source), None)
    if source is None or source.window is None:
        return ""
    if (source.rule.sliding_window, source.rule.chunk) == (call.rule.sliding_window, call.rule.chunk):
        return ""
    return f"reads keys and values of layer {source.layer}, which keeps {source.window} tokens, but sees {call.window or 'all'}"


def _kept_tokens(config: PreTrainedConfig) -> list[int | None]:
    """Tokens that transformers' own cache keeps per layer; None = all, or those of another layer."""
    layers = DynamicCache(config=config).layers
    return [layer.sliding_window if getattr(layer, "is_sliding", False) else None for layer in layers]  # type: ignore[attr-defined]


def _cache_problem(call: LayerCall, kept: int | None, max_model_len: int) -> str:
    """The conflict between a layer's mask and the window of transformers' cache; empty if there is none.

    A model may leave its window to that cache: prompt tokens then see the whole prompt, later tokens only the
    window.
    """
    if kept is None or kept >= max_model_len or (call.window is not None and call.window <= kept):
        return ""
    return (
        f"attends to {call.window or 'all'} tokens by its mask, but transformers' cache keeps {kept}: "
        f"set --max-model-len {kept} or less, where both are equal"
    )
