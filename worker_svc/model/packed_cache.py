"""Packed weights kept between starts: what determines their bytes, and the modules that they belong to.

Not the files themselves (fused/packed_files.py). Only quantized weights are kept: full ones are packed in less time.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

import paged_kernels
from paged_kernels.cpu_library import UnusableCache, private_folder
from paged_kernels.decoder import DecoderKernels
from paged_kernels.program import PackedWeights
from paged_kernels.quantized import FLOAT8, quantized
from worker_svc.model.checkpoint import Checkpoint
from worker_svc.model.fused.packed_files import Pack, PackedFiles
from worker_svc.model.fused.packed_linear import PackedLinear, joint_bias, views
from worker_svc.model.fused.packed_mixture import PackedMixture
from worker_svc.model.kept_files import FileStamp, content_digest
from worker_svc.model.weight_reader import is_left_out
from worker_svc.settings import WorkerSettings

log = logging.getLogger(__name__)

_LEAST_BYTES = 16 * 2**20  # packing less takes no longer than finding it
_SAMPLE = (48, 160)
_STORED_FORMS = ((8, 32), (4, 32))
_CODE = (Path(paged_kernels.__file__).parent, Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class PackedCache:
    """The packed weights of one checkpoint in one form. `stamps`: of its weight files, when `key` was computed."""

    files: PackedFiles
    key: str
    stamps: Mapping[Path, FileStamp]

    def find(self) -> Sequence[Pack]:
        """Map the weights that were kept; none if there are none."""
        return (self.files.load(self.key) if self._is_current() else None) or ()

    def save(self, model: PreTrainedModel) -> None:
        """Keep the packed weights of a model that was loaded from these files, unless they have changed meanwhile.

        Nothing is kept of a model with quantized experts: files hold linear modules alone.
        """
        if any(isinstance(module, PackedMixture) and module.is_quantized for module in model.modules()):
            log.info("packed weights are not kept, because the model has quantized experts: every start packs again")
        elif self._is_current():
            self.files.save(self.key, _packs(model))

    def _is_current(self) -> bool:
        return all(file.exists() and FileStamp.of(file) == stamp for file, stamp in self.stamps.items())


def cache_of(
    found: Checkpoint, settings: WorkerSettings, dtype: torch.dtype, kernels: DecoderKernels, environ: Mapping[str, str]
) -> PackedCache | None:
    """The cache for a checkpoint computed in `dtype`; None if it is turned off, cannot be used, or is not worth it."""
    is_quantized = settings.bits or (found.reader is not None and found.reader.is_quantized)
    is_worth_it = settings.weight_cache and is_quantized and found.loaded_bytes(dtype) >= _LEAST_BYTES
    if not is_worth_it or not (kernels.packs(dtype, _SAMPLE[1]) and kernels.packs_quantized(dtype, torch.int8)):
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


def restored(model: PreTrainedModel, kernels: DecoderKernels, packs: Sequence[Pack]) -> bool:
    """Replace the model's linear modules by ones with these weights. False if they do not fit: the model is of no use then."""
    modules = dict(model.named_modules())
    linears = [_linears(modules, pack) for pack in packs]
    if all(linears):
        _replace(model, kernels, packs, linears)
        if not any(is_left_out(parameter) for parameter in model.parameters()):
            return True
    log.warning("packed weights are not used: they do not fit the model's modules")
    return False


def _replace(
    model: PreTrainedModel, kernels: DecoderKernels, packs: Sequence[Pack], linears: Sequence[list[nn.Linear]]
) -> None:
    head = model.get_output_embeddings()
    for pack, merged in zip(packs, linears, strict=True):
        whole = replace(pack.weights, bias=joint_bias(merged))
        for name, view in zip(pack.names, views(kernels, whole, pack.columns, wide=merged == [head]), strict=True):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, view)


def shapes(packs: Sequence[Pack]) -> dict[str, tuple[int, int]]:
    """Shapes [columns, depth] of the quantized weights in `packs`, by parameter: what need not be read from the checkpoint."""
    return {
        f"{name}.weight": (columns, pack.weights.depth)
        for pack in packs
        if pack.weights.form.stored != "plain"
        for name, columns in zip(pack.names, pack.columns, strict=True)
    }


def _form(settings: WorkerSettings, dtype: torch.dtype, kernels: DecoderKernels) -> bytes:
    """Small packed matrices: their bytes depend on the library's layout, which differs between processors, and on rounding."""
    values = (torch.arange(prod(_SAMPLE)) * 7_919 % 1_009 - 504).view(_SAMPLE).to(dtype) / 64
    wanted = [(settings.bits, settings.quantization_group)] if settings.bits else _STORED_FORMS
    rounded = [quantized(values, bits, group) for bits, group in wanted]
    if not settings.bits:
        rounded.append(replace(rounded[0], numbers=rounded[0].numbers.to(FLOAT8)))
    packed = [kernels.pack(weight, None) for weight in rounded]
    forms = " ".join(str(weights.form) for weights in packed)
    about = f"{settings.quantization} {dtype} {forms} {torch.__version__} {transformers.__version__}"
    return b"".join([about.encode(), *(weights.data.numpy().tobytes() for weights in packed)])


def _code() -> list[bytes]:
    """The sources that read, round and pack weights: a version number could be forgotten when they change."""
    return [file.read_bytes() for folder in _CODE for file in sorted(folder.rglob("*.py"))]


def _descriptions(found: Checkpoint) -> list[bytes]:
    """Names and contents of what is beside the weights: the configuration, and the index of files."""
    beside = sorted(found.path.glob("*.json"))
    names = "\n".join(file.name for file in (*found.weight_files, *beside))
    return [names.encode(), *(file.read_bytes() for file in beside)]


def _linears(modules: Mapping[str, nn.Module], pack: Pack) -> list[nn.Linear]:
    """The modules that a pack replaces; none if they are of another kind or size."""
    found = [module for name in pack.names if type(module := modules.get(name)) is nn.Linear]
    is_alike = all(
        (linear.in_features, linear.weight.dtype) == (pack.weights.depth, pack.weights.dtype) for linear in found
    )
    return found if is_alike and tuple(linear.out_features for linear in found) == pack.columns else []


def _packs(model: nn.Module) -> list[Pack]:
    """Packed weights with the modules that are views of them, in the order of the columns."""
    found: dict[int, tuple[PackedWeights, list[tuple[int, str, int]]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            place = module.weights.data.data_ptr(), name, module.out_features
            found.setdefault(id(module.whole), (module.whole, []))[1].append(place)
    return [
        Pack(tuple(name for _, name, _ in sorted(places)), tuple(columns for _, _, columns in sorted(places)), whole)
        for whole, places in found.values()
    ]
