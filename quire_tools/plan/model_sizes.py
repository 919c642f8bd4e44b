"""A model's sizes from its configuration: its class is built on torch's meta device, so no weight is read."""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paged_kernels.backend import CacheShape, scale_bytes
from paged_kernels.quantized import FLOAT8
from svc_common.errors import ConfigError
from worker_svc.model import architecture, attention, checkpoint, stored_weights
from worker_svc.model.attention import LayerCall
from worker_svc.model.decoder.part import PackedPast
from worker_svc.model.formats.forms import MatrixForm
from worker_svc.model.formats.registry import format_of
from worker_svc.model.formats.weights import FormattedWeights
from worker_svc.model.states.layout import StateShape
from worker_svc.model.states.probe import StateProbe

_PROBE_TOKENS = 4
_BLOCK_SIZE = 16  # any value will do here
_PANEL, _SCALE_BYTES = 16, 2
_PACKED = (torch.float32, torch.bfloat16)  # the CPU kernels pack weights of these types


@dataclass(frozen=True, slots=True)
class Rounding:
    """Numbers of `bits` with factors of `factor_bytes` for each `group`, as the CPU kernels pack them."""

    bits: int
    group: int
    factor_bytes: int = _SCALE_BYTES

    def packed_bytes(self, linear: nn.Linear) -> int:
        """Bytes of a linear module's weight: whole panels of columns, whole groups of depths."""
        columns = -(-linear.out_features // _PANEL) * _PANEL
        return columns * -(-linear.in_features // self.group) * (self.group * self.bits // 8 + self.factor_bytes)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes that memory depends on.

    `loaded_bytes`: of the weights in the compute type; `weight_bytes`: of those that are kept, which
    `--quantization` and quantized checkpoints make smaller; `tied_head_bytes`: of a head tied to the embedding,
    of which a CPU keeps a packed copy; `padding_bytes`: by which packing on a CPU fills up matrices;
    `file_bytes`: of the weight files, None if not all are here;
    `max_model_len`: the model's maximum, or the one requested; `cache_scale_bytes`: for each token and kv head;
    `num_attention_kinds`: different rules of attention among the layers; `windows`: of each layer that has keys and values, None =
    the whole sequence; `states`: of each module that has states of sequences.
    """

    name: str
    dtype: str
    dtype_bytes: int
    cache_dtype: str
    cache_dtype_bytes: int
    cache_scale_bytes: int
    loaded_bytes: int
    weight_bytes: int
    tied_head_bytes: int
    padding_bytes: int
    num_parameters: int
    file_bytes: int | None
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    num_attention_kinds: int = 1
    windows: tuple[int | None, ...] = ()
    states: tuple[tuple[StateShape, ...], ...] = ()

    @property
    def num_cached_layers(self) -> int:
        """Layers that have keys and values."""
        return len(self.windows) or self.num_layers


def model_sizes(
    path: Path,
    *,
    dtype: str,
    kv_cache_dtype: str,
    max_model_len: int | None,
    rounding: Rounding | None = None,
    packs: Collection[torch.dtype] = (),
) -> ModelSizes:
    """Sizes of the checkpoint in a folder; config.json is enough. Raises ConfigError if it cannot be served.

    `rounding`: of the linear weights when they are loaded. `packs`: dtypes of the numbers of a quantized checkpoint
    that are kept as they are stored.
    """
    if path.is_file():
        to_do = "name a folder with the config.json of the model that it was made from"
        raise ConfigError(
            f"--model {path} is a file; plans of GGUF files are not made yet: {to_do}", reason="MODEL_UNSUPPORTED"
        )
    if not (path / "config.json").is_file():
        checkpoint.open_checkpoint(path)  # raises, naming what is missing
    files = _weight_files(path)
    reader = checkpoint.weight_reader(path, files) if files else None
    found = checkpoint.Checkpoint(path, checkpoint.read_config(path), files, reader)
    cls = checkpoint.model_class(found)
    architecture.check_class(found, cls)
    form_of = _forms(found)
    computed = checkpoint.choose_dtype(found, dtype, keeps_numbers=torch.int8 in packs and form_of is not None)
    cached = checkpoint.choose_cache_dtype(kv_cache_dtype, computed)
    with torch.device("meta"):
        model = cls._from_config(found.config, dtype=computed, attn_implementation=attention.register()).eval()
    config = found.text_config
    longest = checkpoint.choose_max_model_len(found, max_model_len)
    shape, num_kinds, windows, states = _cache_shape(model, config, longest)
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    hidden, loaded_bytes = int(config.hidden_size), sum(tensor.nbytes for tensor in tensors)
    rounding_of = _rounding_of(form_of, packs) if rounding is None else lambda _module: rounding
    saved, tied_head_bytes, padding_bytes = _rounded(model, rounding_of)
    return ModelSizes(
        name=path.resolve().name,
        dtype=str(computed).removeprefix("torch."),
        dtype_bytes=computed.itemsize,
        cache_dtype=str(cached).removeprefix("torch."),
        cache_dtype_bytes=cached.itemsize,
        cache_scale_bytes=scale_bytes(cached),
        loaded_bytes=loaded_bytes,
        weight_bytes=loaded_bytes - saved,
        tied_head_bytes=tied_head_bytes,
        padding_bytes=padding_bytes,
        num_parameters=sum(tensor.numel() for tensor in tensors),
        file_bytes=_file_bytes(found.weight_files),
        num_layers=int(config.num_hidden_layers),
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        hidden_size=hidden,
        intermediate_size=int(
            _first(config, ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")) or 4 * hidden
        ),
        vocab_size=int(config.vocab_size),
        max_model_len=longest,
        num_attention_kinds=num_kinds,
        windows=windows,
        states=states,
    )


RoundingOf = Callable[[str], Rounding | None]
"""How the quantized weights of a module with this name are packed; None if they are not."""


def _forms(found: checkpoint.Checkpoint) -> Callable[[str], MatrixForm | None] | None:
    """How modules are stored, by headers or else by config.json; None if the checkpoint is not quantized."""
    if isinstance(found.reader, FormattedWeights):
        return found.reader.forms.get
    said = stored_weights.quantization(checkpoint.read_json(found.path / "config.json"), found.path)
    if said is None:
        return None
    stored = format_of(said)
    return lambda module: None if stored.skips(module) else stored.form_of(module)


def _rounding_of(form_of: Callable[[str], MatrixForm | None] | None, packs: Collection[torch.dtype]) -> RoundingOf:
    def of(module: str) -> Rounding | None:
        form = None if form_of is None else form_of(module)
        if form is None or not form.kept_group or (FLOAT8 if form.layout.is_float else torch.int8) not in packs:
            return None
        return Rounding(form.kept_bits, form.kept_group, form.factor_bytes)

    return of


def _rounded(model: Any, rounding_of: RoundingOf) -> tuple[int, int, int]:
    """Bytes that packing saves, those of a tied head, the embedding of which is kept as it is, and those of padding."""
    embedding, saved, tied, padding = model.get_input_embeddings().weight, 0, 0, 0
    for name, linear in model.named_modules():
        if type(linear) is not nn.Linear:
            continue
        rounding, plain = rounding_of(name), linear.weight.nbytes if linear.weight.dtype in _PACKED else 0
        if linear.weight is embedding:
            tied += plain if rounding is None else rounding.packed_bytes(linear)
        elif rounding is not None:
            saved += linear.weight.nbytes - rounding.packed_bytes(linear)
        elif plain:
            padding += -linear.out_features % _PANEL * linear.in_features * linear.weight.itemsize
    return saved, tied, padding


def _first(config: Any, names: tuple[str, ...]) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _weight_files(path: Path) -> tuple[Path, ...]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = {Path(str(name)).name for name in checkpoint.read_json(index).get("weight_map", {}).values()}
        files = sorted(path / name for name in names)
    else:
        files = [path / "model.safetensors"]
    return tuple(files) if all(file.is_file() for file in files) else ()


def _file_bytes(files: tuple[Path, ...]) -> int | None:
    """Bytes of the tensors, by the files' headers."""
    if not files:
        return None
    return sum(os.stat(file).st_size - stored_weights.header_of(file)[1] for file in files)


def _window(config: Any, layer_type: str) -> int | None:
    """Tokens that a layer of that type sees at most; None = the whole sequence."""
    fields = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    return getattr(config, fields[layer_type], None) if layer_type in fields else None


Found = tuple[CacheShape, int, tuple[int | None, ...], tuple[tuple[StateShape, ...], ...]]


def _cache_shape(model: Any, config: Any, max_model_len: int) -> Found:
    """Shape of the cache, number of attention rules, the layers' windows, and states, by the worker's own probe of calls.

    Raises ConfigError as a worker would. If a model's control flow depends on values (such as a choice of
    experts), which meta tensors lack, uses the configuration.
    """
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    is_stateful = architecture.may_have_states(type(model), config)
    try:
        calls, states = _probed_in_bfloat16(model, max_model_len) if is_stateful else _probed(model, max_model_len)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        if is_stateful:
            raise architecture.unsupported(f"the states of {type(model).__name__} are not known: {error}") from error
        heads = int(config.num_attention_heads)
        num_kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        keys = _first(config, ("qk_head_dim", "head_dim")) or config.hidden_size // heads
        shape = CacheShape(_BLOCK_SIZE, num_kv_heads, max(int(keys), int(_first(config, ("v_head_dim",)) or 0)))
        return shape, len({*kinds}), tuple(_window(config, kind) for kind in kinds), ()
    shape = architecture.check_calls(
        model,
        config,
        calls,
        range(config.num_hidden_layers),
        block_size=_BLOCK_SIZE,
        max_model_len=max_model_len,
        state_layers={of_module[0].key.layer for of_module in states},
    )
    windows = tuple(call.window for call in calls)
    return shape, len({call.rule for call in calls}), windows, tuple(states)


def _probed_in_bfloat16(model: Any, max_model_len: int) -> tuple[list[LayerCall], list[tuple[StateShape, ...]]]:
    """As if in the model's own type: experts are grouped on the meta device in this one alone."""
    with torch.device("meta"):
        short = type(model)._from_config(model.config, dtype=torch.bfloat16, attn_implementation=attention.register())
    calls, states = _probed(short.eval(), max_model_len, has_states=True)
    own = {torch.bfloat16: model.dtype}
    return calls, [tuple(replace(x, dtype=own.get(x.dtype, x.dtype)) for x in of_module) for of_module in states]


def _probed(
    model: Any, max_model_len: int, *, has_states: bool = False
) -> tuple[list[LayerCall], list[tuple[StateShape, ...]]]:
    """Attention calls, and the states of modules that have some."""
    tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device="meta")
    with torch.inference_mode(), attention.probing(model, max_model_len) as calls:
        seen = StateProbe(_PROBE_TOKENS, calls.__len__)
        past = {"past_key_values": PackedPast(model.config, seen)} if has_states else {}
        with seen.watching(model):
            model(input_ids=tokens, use_cache=False, **past)
        return calls, [each.states for each in seen.modules()]
