"""A model's sizes from its configuration: its class is built on torch's meta device, so no weight is read."""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from paged_kernels.backend import scale_bytes
from paged_kernels.quantized import FLOAT8
from svc_common.errors import ConfigError
from worker_svc.model import architecture, attention, checkpoint, latent, memory, stored_weights
from worker_svc.model.cache.layer_cache import pool_layers
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
    `num_attention_kinds`: different rules of attention among the layers. `num_layers`: of the KV cache, which may count parts of
    layers or leave out those without keys and values of their own; `windows`: of each, None = the whole sequence; `states`: of
    each module that has states of sequences.
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

    def block_bytes(self, num_layers: int, block_size: int) -> int:
        """Bytes of a block over so many layers."""
        return memory.block_bytes(
            dtype_bytes=self.cache_dtype_bytes,
            scale_bytes=self.cache_scale_bytes,
            num_layers=num_layers,
            block_size=block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )

    def with_weights_of(self, other: "ModelSizes") -> "ModelSizes":
        """The same with the weights of another model beside its own."""
        fields = ("loaded_bytes", "weight_bytes", "tied_head_bytes", "padding_bytes")
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in fields})


def model_sizes(
    path: Path,
    *,
    dtype: str,
    kv_cache_dtype: str,
    max_model_len: int | Literal["auto"] | None,
    rounding: Rounding | None = None,
    packs: Collection[torch.dtype] = (),
    latent_cache: bool = True,
) -> ModelSizes:
    """Sizes of the checkpoint in a folder; config.json is enough. Raises ConfigError if it cannot be served.

    `rounding`: of the linear weights when they are loaded. `packs`: dtypes of the numbers of a quantized checkpoint
    that are kept as they are stored. `latent_cache`: of latent attention, whether its narrow vectors are cached.
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
        model = cls._from_config(  # type: ignore[no-untyped-call]
            found.config, dtype=computed, attn_implementation=attention.register(), experts_implementation="batched_mm"
        ).eval()
    config = found.text_config
    longest = checkpoint.choose_max_model_len(found, max_model_len)
    if latent_cache:
        latent.absorb(model)
    calls, states = probed(model, config, longest)
    shapes = architecture.check_calls(
        model,
        config,
        calls,
        range(config.num_hidden_layers),
        block_size=_BLOCK_SIZE,
        max_model_len=longest,
        state_layers={of_module[0].key.layer for of_module in states},
    )
    layers = pool_layers(shapes, {call.layer: call.window for call in calls if call.source is None}, cached)
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
        num_layers=len(layers.windows),
        num_kv_heads=layers.shape.num_kv_heads,
        head_dim=layers.shape.head_dim,
        hidden_size=hidden,
        intermediate_size=_intermediate(config) or 4 * hidden,
        vocab_size=int(config.vocab_size),
        max_model_len=longest,
        num_attention_kinds=len({call.rule for call in calls}),
        windows=tuple(layers.windows.values()),
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


def _intermediate(config: Any) -> int:
    """Largest intermediate size of all layers; 0 if the configuration has none."""
    found = _first(config, ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")) or 0
    return int(max(found)) if isinstance(found, list) else int(found)


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


def probed(
    model: Any, config: Any, max_model_len: int
) -> tuple[list[attention.LayerCall], tuple[tuple[StateShape, ...], ...]]:
    """Attention calls, and the states of modules that have some, by the worker's own probe.

    Raises ConfigError for a model that cannot run without values of its weights.
    """
    tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode(), attention.probing(model, max_model_len) as calls:
            seen = StateProbe(_PROBE_TOKENS, calls.__len__)
            with seen.watching(model):
                model(
                    input_ids=tokens,
                    position_ids=tokens,
                    use_cache=False,
                    past_key_values=PackedPast(config, seen),
                    logits_to_keep=tokens[0],
                )
            states = tuple(each.states for each in seen.modules())
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise ConfigError(
            f"{type(model).__name__} cannot be planned, because it does not run without its weights ({error}): start a worker, "
            "which measures its memory",
            reason="MODEL_UNSUPPORTED",
        ) from None
    return [_with_chunk(call, config) for call in calls], states


def _with_chunk(call: attention.LayerCall, config: Any) -> attention.LayerCall:
    """The call with the configured size of its chunks: transformers' masks of chunks hold tensors, which have no values here."""
    kinds = getattr(config, "layer_types", None)
    if not kinds or kinds[call.layer] != "chunked_attention":
        return call
    return replace(call, problem="", rule=replace(call.rule, chunk=int(config.attention_chunk_size)))
