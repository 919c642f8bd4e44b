"""A checkpoint on disk: its contents, whether it may be loaded, and its weights in the model's own class.

Only safetensors and GGUF are read and no code of the checkpoint is run. `architecture.py` checks the model class.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from svc_common.errors import ConfigError
from worker_svc.model import stored_weights
from worker_svc.model.decoder import text_half
from worker_svc.model.formats.forms import UnsupportedWeights
from worker_svc.model.formats.registry import format_of
from worker_svc.model.formats.weights import FormattedWeights
from worker_svc.model.fused.packed_linear import WeightOf, plain_weight
from worker_svc.model.gguf.folder import folder_of
from worker_svc.model.gguf.header import SUFFIX, open_gguf
from worker_svc.model.gguf.weights import GgufWeights
from worker_svc.model.weight_reader import LateForms, OnDemand, StoredForms, WeightReader

log = logging.getLogger(__name__)

Progress = Callable[[float], None]

_PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WITH_SCALES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_CONVERT = (
    "Only safetensors are read, because a pickled file can run any code when it is opened. Convert it once, in an isolated "
    "process: quire convert FOLDER NEW_FOLDER"
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that may be loaded. `config` is the whole configuration, `text_config` the decoder's part.

    `path`: the folder with everything but the weights. `reader`: of the weights, None if transformers reads them.
    """

    path: Path
    config: PreTrainedConfig
    weight_files: tuple[Path, ...]
    reader: WeightReader | None = None

    @property
    def text_config(self) -> PreTrainedConfig:
        """Configuration of the text decoder; for most models the whole configuration."""
        return self.config.get_text_config(decoder=True)

    def loaded_bytes(self, dtype: torch.dtype, left_out: Mapping[str, tuple[int, int]] = MappingProxyType({})) -> int:
        """Size of the weights in the model's compute dtype, whatever their storage dtype; of those `left_out` a byte each."""
        if self.reader is not None:
            saved = (dtype.itemsize - 1) * sum(map(prod, left_out.values()))
            return dtype.itemsize * self.reader.num_elements - saved
        return dtype.itemsize * stored_weights.num_elements(stored_weights.entries_of(self.weight_files))

    def digest(self) -> str:
        """SHA-256 (hex) over config.json and the weight files' names and sizes."""
        total = hashlib.sha256((self.path / "config.json").read_bytes())
        for file in self.weight_files:
            total.update(f"\0{file.name}\0{file.stat().st_size}".encode())
        return total.hexdigest()


def open_checkpoint(path: Path) -> Checkpoint:
    """Check a checkpoint: a folder or a GGUF file.

    Raises ConfigError saying what is missing or not supported, or how to convert pickled weights.
    """
    if path.suffix == SUFFIX and path.is_file():
        header = open_gguf(path)
        folder = folder_of(header)
        config = read_config(folder)
        return Checkpoint(folder, config, (path,), GgufWeights(header, config))
    if not path.is_dir():
        raise _error(
            "MODEL_NOT_FOUND", path, "is no folder and no GGUF file; give the folder of a checkpoint, or a .gguf file"
        )
    if not (path / "config.json").is_file():
        raise _error("MODEL_INCOMPLETE", path, "has no config.json; give the folder that contains it")
    weights = _weight_files(path)
    if not (path / "tokenizer.json").is_file():
        raise _error(
            "MODEL_INCOMPLETE",
            path,
            "has no tokenizer.json; create it with AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )
    config = read_config(path)
    return Checkpoint(path, config, weights, weight_reader(path, weights))


def weight_reader(path: Path, files: tuple[Path, ...]) -> WeightReader | None:
    """Reader of the weights in a folder's files, by their headers; None if transformers reads them.

    Raises ConfigError if they are stored in a way that is not supported.
    """
    try:
        entries = stored_weights.entries_of(files)
    except (OSError, ValueError) as error:
        raise _error("MODEL_UNREADABLE", path, f"cannot be loaded: {_first_line(error)}") from error
    said = stored_weights.quantization(read_json(path / "config.json"), path)
    _check_quantization(path, stored_weights.problem_of_weights(said, entries))
    return None if said is None else FormattedWeights(files, format_of(said), entries)


def _check_quantization(path: Path, problem: str) -> None:
    if problem:
        raise _error("QUANTIZATION_UNSUPPORTED", path, f"{problem}; {stored_weights.TO_DO}")


def _error(reason: str, path: Path, what: str) -> ConfigError:
    return ConfigError(f"--model {path} {what}", reason=reason, metadata={"model": str(path)})


def read_config(path: Path) -> PreTrainedConfig:
    """The configuration of a folder, read by transformers.

    Raises ConfigError for a model type that transformers does not know and for unsupported quantization.
    """
    raw = read_json(path / "config.json")
    _check_quantization(path, stored_weights.problem_of(stored_weights.quantization(raw, path)))
    if "auto_map" in raw and "model_type" not in raw:
        raise _error(
            "MODEL_UNSUPPORTED",
            path,
            "needs code of its own, which Quire never runs; use a model that transformers includes",
        )
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        kind = raw.get("model_type", "none")
        raise _error(
            "MODEL_UNSUPPORTED",
            path,
            f"has model type {kind!r}, which the installed transformers cannot read: {_first_line(error)}",
        ) from error
    for part in (config, config.get_text_config(decoder=True)):
        if isinstance(part, PreTrainedConfig):
            part.__dict__.pop("quantization_config", None)  # transformers would read the weights by it
    return text_half.without_other_parts(config)


def _weight_files(path: Path) -> tuple[Path, ...]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({path / Path(name).name for name in read_json(index).get("weight_map", {}).values()})
    else:
        files = [path / "model.safetensors"]
    missing = [file.name for file in files if not file.is_file()]
    if not missing:
        return tuple(files)
    pickled = sorted(file.name for pattern in _PICKLED for file in path.glob(pattern))
    if pickled:
        raise _error("PICKLED_WEIGHTS", path, f"has only pickled weights ({pickled[0]}). {_CONVERT}")
    raise _error("MODEL_INCOMPLETE", path, f"lacks {', '.join(missing)}")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ConfigError naming the file if it has none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", reason="MODEL_INCOMPLETE") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not contain a JSON object", reason="MODEL_INCOMPLETE")
    return value


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def choose_dtype(checkpoint: Checkpoint, wanted: str, *, keeps_numbers: bool = False) -> torch.dtype:
    """The compute dtype. `wanted`: "auto" = as stored, else a name of vLLM's --dtype.

    `keeps_numbers`: the checkpoint is quantized and the kernels multiply with its numbers: "auto" is then
    bfloat16 in place of float16, for which they have no products.
    """
    if wanted != "auto":
        return _DTYPES[wanted]
    stored = checkpoint.config.dtype or checkpoint.text_config.dtype
    if keeps_numbers and stored == torch.float16:
        return torch.bfloat16
    return stored if stored in _DTYPES.values() else torch.float32


def choose_cache_dtype(wanted: str, computed: torch.dtype) -> torch.dtype:
    """The KV cache dtype. `wanted`: "auto" = the compute dtype, else a supported name of vLLM's --kv-cache-dtype."""
    return computed if wanted == "auto" else (_DTYPES | _WITH_SCALES)[wanted]


def choose_max_model_len(checkpoint: Checkpoint, given: int | Literal["auto"] | None) -> int:
    """`given`, else the configuration's limit. Raises ConfigError if the model does not support `given`."""
    wanted = given if isinstance(given, int) else None
    config = checkpoint.text_config
    own = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if wanted is None and own is None:
        raise ConfigError("the checkpoint does not give a maximum length; set --max-model-len", reason="MAX_MODEL_LEN")
    if wanted is not None and own is not None and wanted > own:
        raise ConfigError(
            f"--max-model-len {wanted} is more than the {own} positions that {checkpoint.path.name} was made for",
            reason="MAX_MODEL_LEN",
            metadata={"limit": str(own)},
        )
    return wanted or int(own or 0)


def model_class(checkpoint: Checkpoint) -> type[PreTrainedModel]:
    """transformers' causal language model class for this configuration. Raises ConfigError if there is none.

    Of a model that also takes other inputs than text: the class without what these need.
    """
    config = checkpoint.config
    found = text_half.class_of(config)
    if found is None:
        names = ", ".join(config.architectures or [config.model_type])
        raise _error("MODEL_UNSUPPORTED", checkpoint.path, f"is {names}, which is not a causal language model")
    whole_type = read_json(checkpoint.path / "config.json").get("model_type", config.model_type)
    has_parts = checkpoint.text_config is not config or whole_type != config.model_type
    return text_half.text_half(found) if has_parts else found


def late_weights(checkpoint: Checkpoint, cls: type[PreTrainedModel]) -> dict[str, tuple[int, int]]:
    """Shapes of the E4M3 matrices that linear modules have under the same name: these can be read when they are packed."""
    found = {} if checkpoint.reader is None else checkpoint.reader.float_shapes()
    if not found:
        return {}
    with torch.device("meta"):
        model = cls._from_config(checkpoint.config)
    linears = {f"{name}.weight" for name, module in model.named_modules() if type(module) is nn.Linear}
    return {name: shape for name, shape in found.items() if name in linears}


def load_model(
    checkpoint: Checkpoint,
    cls: type[PreTrainedModel],
    dtype: torch.dtype,
    attention: str,
    progress: Progress,
    device: torch.device | None = None,
    left_out: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> tuple[PreTrainedModel, WeightOf]:
    """Load the model with its weights, for inference; and the form in which these were stored, for packing.

    `attention`: name registered with transformers' AttentionInterface. `device`: each weight is moved there
    as it is read, so that the host never holds more than a few; None = the host. `left_out`: see `OnDemand`; with
    a device they are read when their modules are packed.
    """
    weight_of: WeightOf = plain_weight
    try:
        if checkpoint.reader is None:
            model, missing = _loaded_by_transformers(checkpoint, cls, dtype, attention, progress, device)
        else:
            model, missing, weight_of = _loaded_by(
                checkpoint.reader, checkpoint, cls, dtype, attention, progress, device, left_out
            )
    except UnsupportedWeights as error:
        raise _error("QUANTIZATION_UNSUPPORTED", checkpoint.path, f"{error}; {stored_weights.TO_DO}") from error
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise _error("MODEL_UNREADABLE", checkpoint.path, f"cannot be loaded: {_first_line(error)}") from error
    if missing:
        raise _error("MODEL_INCOMPLETE", checkpoint.path, f"lacks {len(missing)} weights, {missing[0]} first")
    return model.eval().requires_grad_(False), weight_of


def _loaded_by_transformers(
    checkpoint: Checkpoint,
    cls: type[PreTrainedModel],
    dtype: torch.dtype,
    attention: str,
    progress: Progress,
    device: torch.device | None,
) -> tuple[PreTrainedModel, list[str]]:
    """The model, and names of missing weights."""
    with _reported(progress):
        model, notes = cls.from_pretrained(
            checkpoint.path,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            device_map=None if device is None else {"": device},
        )
    return model, sorted(notes["missing_keys"])


def _loaded_by(
    reader: WeightReader,
    checkpoint: Checkpoint,
    cls: type[PreTrainedModel],
    dtype: torch.dtype,
    attention: str,
    progress: Progress,
    device: torch.device | None,
    left_out: Mapping[str, tuple[int, int]],
) -> tuple[PreTrainedModel, list[str], WeightOf]:
    """The model, names of missing weights, and the stored form of the others."""
    tensors = reader.tensors(dtype)
    taken = OnDemand(tensors, keeps=device is None, dtype=dtype, left_out=left_out, device=device)
    try:
        with _reported(progress):
            model, notes = cls.from_pretrained(
                None,
                config=checkpoint.config,
                state_dict=taken.state,
                dtype=dtype,
                attn_implementation=attention,
                output_loading_info=True,
                device_map=None if device is None else {"": device},
            )
    finally:
        if taken.problem is not None:
            raise taken.problem
    reader.finish(model)
    _check_biases(taken, notes["unexpected_keys"])
    weight_of: WeightOf = StoredForms(model, taken) if taken.forms or left_out else plain_weight
    if device is not None and left_out:
        weight_of = LateForms(model, tensors, left_out)
    return model, sorted(notes["missing_keys"]), weight_of


def _check_biases(taken: OnDemand, unexpected: Collection[str]) -> None:
    """Raise UnsupportedWeights for a bias of quantized weights that the model does not add. Some tools store biases of zero."""
    for name in sorted(unexpected):
        is_bias = name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in taken.quantized
        if is_bias and name in taken.state and bool(taken.state[name][...].any()):
            raise UnsupportedWeights(f"has {name}, which transformers' class of this model does not add")


class _Bar:
    """Replaces transformers' progress bar and forwards its fraction."""

    def __init__(self, progress: Progress, items: Any = None, total: int | None = None) -> None:
        self._progress, self._items = progress, items
        self._total = total or (len(items) if hasattr(items, "__len__") else 0)
        self._done = 0

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            yield item
            self.update(1)

    def update(self, count: int = 1) -> None:
        self._done += count
        if self._total:
            self._progress(min(1.0, self._done / self._total))

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_args, **_kwargs: None


@contextlib.contextmanager
def _reported(progress: Progress) -> Iterator[None]:
    """Redirect transformers' progress bars from the terminal to `progress`, where this release allows it."""
    set_hook = getattr(transformers_logging, "set_tqdm_hook", None)
    if set_hook is None:
        shown = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        restore = transformers_logging.enable_progress_bar if shown else transformers_logging.disable_progress_bar
    else:
        previous = set_hook(
            lambda _factory, args, kwargs: _Bar(
                progress, args[0] if args else kwargs.get("iterable"), kwargs.get("total")
            )
        )
        restore = lambda: set_hook(previous)  # noqa: E731
    try:
        yield
    finally:
        restore()
