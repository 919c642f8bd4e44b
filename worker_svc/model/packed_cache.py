"""Packed weights kept between starts: what determines their bytes, and the modules that they belong to.

Not the files themselves (fused/packed_files.py). Full weights, and quantized and GGUF checkpoints, are packed at every start.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

import paged_kernels
from paged_kernels.cpu_library import UnusableCache, private_folder
from paged_kernels.decoder import DecoderKernels, PackedWeights
from paged_kernels.quantized import quantized
from worker_svc.model.checkpoint import Checkpoint
from worker_svc.model.fused.packed_files import PackedFiles, Packs
from worker_svc.model.fused.packed_linear import PackedLinear, joint_bias, views
from worker_svc.model.kept_files import FileStamp, content_digest
from worker_svc.settings import WorkerSettings

log = logging.getLogger(__name__)

_LEAST_BYTES = 16 * 2**20  # packing less takes no longer than finding it
_SAMPLE = (48, 160)
_CODE = (Path(paged_kernels.__file__).parent, Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class PackedCache:
    """The packed weights of one checkpoint in one form. `stamps`: of its weight files, when `key` was computed."""

    files: PackedFiles
    key: str
    stamps: Mapping[Path, FileStamp]

    def restore(self, model: PreTrainedModel, kernels: DecoderKernels) -> bool:
        """Replace the model's linear modules by ones with mapped weights. False, and no change, if there are none."""
        found = self.files.load(self.key) if self._is_current() else None
        if found is None:
            return False
        modules = dict(model.named_modules())
        linears = {names: _linears(modules, names, weights) for names, weights in found.items()}
        if not all(linears.values()):
            log.warning("packed weights with key %s are not used: they do not fit the model's modules", self.key)
            return False
        head = model.get_output_embeddings()
        for names, weights in found.items():
            whole = replace(weights, bias=joint_bias(linears[names]))
            columns = [linear.out_features for linear in linears[names]]
            for name, view in zip(names, views(kernels, whole, columns, wide=linears[names] == [head]), strict=True):
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, view)
        return True

    def save(self, model: PreTrainedModel) -> None:
        """Keep the packed weights of a model that was loaded from these files, unless they have changed meanwhile."""
        if self._is_current():
            self.files.save(self.key, _packs(model))

    def _is_current(self) -> bool:
        return all(file.exists() and FileStamp.of(file) == stamp for file, stamp in self.stamps.items())


def packed_cache(
    found: Checkpoint, settings: WorkerSettings, dtype: torch.dtype, kernels: DecoderKernels, environ: Mapping[str, str]
) -> PackedCache | None:
    """The cache for a checkpoint computed in `dtype`; None if it is turned off, cannot be used, or is not worth it."""
    is_packable = found.reader is None and kernels.packs(dtype, _SAMPLE[1])
    if not (settings.weight_cache and settings.bits and is_packable) or found.loaded_bytes(dtype) < _LEAST_BYTES:
        return None
    try:
        folder = private_folder(environ, "weights")
        stamps = {file: FileStamp.of(file) for file in found.weight_files}
        digests = [content_digest(folder, file, stamp) for file, stamp in stamps.items()]
        rest = _form(settings, dtype, kernels), *_code(), *_descriptions(found)
    except (OSError, UnusableCache) as error:
        log.warning("packed weights are not kept, so every start packs again: %s", error)
        return None
    parts = [hashlib.sha256(part).digest() for part in ("\n".join(digests).encode(), *rest)]
    return PackedCache(PackedFiles(folder), hashlib.sha256(b"".join(parts)).hexdigest(), stamps)


def _form(settings: WorkerSettings, dtype: torch.dtype, kernels: DecoderKernels) -> bytes:
    """A small packed matrix: its bytes depend on the library's layout, which differs between processors, and on rounding."""
    values = (torch.arange(prod(_SAMPLE)) * 7_919 % 1_009 - 504).view(_SAMPLE).to(dtype) / 64
    packed = kernels.pack(quantized(values, settings.bits, settings.quantization_group), None)
    return (
        f"{dtype} {packed.form} {torch.__version__} {transformers.__version__}".encode() + packed.data.numpy().tobytes()
    )


def _code() -> list[bytes]:
    """The sources that read, round and pack weights: a version number could be forgotten when they change."""
    return [file.read_bytes() for folder in _CODE for file in sorted(folder.rglob("*.py"))]


def _descriptions(found: Checkpoint) -> list[bytes]:
    """Names and contents of what is beside the weights: the configuration, and the index of files."""
    beside = sorted(found.path.glob("*.json"))
    names = "\n".join(file.name for file in (*found.weight_files, *beside))
    return [names.encode(), *(file.read_bytes() for file in beside)]


def _linears(modules: Mapping[str, nn.Module], names: tuple[str, ...], weights: PackedWeights) -> list[nn.Linear]:
    """The modules with these names; none if they are of another kind or size than the weights."""
    found = [module for name in names if type(module := modules.get(name)) is nn.Linear]
    fits = all((linear.in_features, linear.weight.dtype) == (weights.depth, weights.dtype) for linear in found)
    fits = fits and sum(linear.out_features for linear in found) == weights.columns
    return found if fits and len(found) == len(names) else []


def _packs(model: nn.Module) -> Packs:
    """Packed weights by the modules that are views of them, in the order of the columns."""
    found: dict[int, tuple[PackedWeights, list[tuple[int, str]]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            place = module.weights.data.data_ptr(), name
            found.setdefault(id(module.whole), (module.whole, []))[1].append(place)
    return {tuple(name for _, name in sorted(places)): whole for whole, places in found.values()}
