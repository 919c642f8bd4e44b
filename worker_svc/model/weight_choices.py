"""How a checkpoint's weights are held: in which dtype, rounded or as they are stored, read at once or when they are packed."""

import importlib.util
import logging
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from paged_kernels.decoder import DecoderKernels
from paged_kernels.quantized import FLOAT8, quantized
from svc_common.errors import ConfigError
from worker_svc.device.devices import HOST, Device
from worker_svc.model import checkpoint
from worker_svc.model.decoder import text_half
from worker_svc.model.fused.packed_linear import WeightOf
from worker_svc.settings import WorkerSettings

log = logging.getLogger(__name__)


def weight_bytes(
    found: checkpoint.Checkpoint, cls: type[PreTrainedModel], dtype: torch.dtype, late: Mapping[str, tuple[int, int]]
) -> int:
    """Memory for the weights when they are loaded: for all of the checkpoint's, or less where not all are read."""
    of_all, num_read = found.loaded_bytes(dtype, late), text_half.num_read(cls, found.config)
    return of_all if num_read is None else min(of_all, dtype.itemsize * num_read)


def late_weights(
    found: checkpoint.Checkpoint,
    cls: type[PreTrainedModel],
    device: Device,
    dtype: torch.dtype,
    fast: DecoderKernels | None,
) -> dict[str, tuple[int, int]]:
    """The weights that a device reads when they are packed, so that it never holds them dequantized."""
    keeps = fast is not None and device is not HOST and fast.packs_quantized(dtype, FLOAT8)
    return checkpoint.late_weights(found, cls) if keeps else {}


def loaded_onto(device: Device) -> torch.device | None:
    """Device that transformers puts each weight on as it reads it; None = the host.

    Raises ConfigError without accelerate.
    """
    if device is HOST:
        return None
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError(
            f"loading weights onto {device.torch_device} needs accelerate: pip install accelerate, or use --device cpu",
            reason="NO_ACCELERATE",
        )
    return device.torch_device


def with_stored_numbers(
    settings: WorkerSettings, found: checkpoint.Checkpoint, dtype: torch.dtype, fast: DecoderKernels | None
) -> torch.dtype:
    """The compute dtype for a checkpoint that may be quantized; logs if its numbers are not multiplied as they are."""
    if found.reader is None or not found.reader.is_quantized:
        return dtype
    numbers = torch.int8 if found.reader.has_integers else FLOAT8
    keeps = fast is not None and fast.packs_quantized(torch.float32, numbers)
    lacks_half = fast is not None and not fast.packs_quantized(torch.float16, numbers)
    chosen = checkpoint.choose_dtype(found, settings.dtype, keeps_numbers=True) if keeps and lacks_half else dtype
    name = str(chosen).removeprefix("torch.")
    if fast is None or not fast.packs_quantized(chosen, numbers):
        log.info(
            "the checkpoint's weights are dequantized to %s: the kernels do not multiply with them as they are stored",
            name,
        )
    elif chosen != dtype:
        log.info("--dtype auto: %s, because quantized weights are not multiplied with float16", name)
    return chosen


def chosen_rounding(
    settings: WorkerSettings, found: checkpoint.Checkpoint, dtype: torch.dtype, fast: DecoderKernels | None
) -> WeightOf | None:
    """How `--quantization` rounds weights, None if it does not. Raises ConfigError where that is not possible."""
    wanted = settings.quantization
    if wanted == "none":
        return None
    if found.reader is not None and found.reader.has_integers:
        raise ConfigError(
            f"--quantization {wanted} rounds unquantized weights, and those of {settings.model} are quantized: leave it out",
            reason="QUANTIZATION_UNSUPPORTED",
        )
    if fast is None or not fast.packs_quantized(torch.float32, torch.int8):
        raise ConfigError(
            f"--quantization {wanted} needs the compiled CPU kernels: --device cpu, --backend auto or cpu, and Quire's "
            "wheel for this platform or a C++ compiler",
            reason="NO_INT8_KERNELS",
        )
    if not fast.packs_quantized(dtype, torch.int8):
        raise ConfigError(
            f"--quantization {wanted} does not support {str(dtype).removeprefix('torch.')}: use --dtype bfloat16 or float32",
            reason="NO_INT8_KERNELS",
        )
    return lambda linear: quantized(linear.weight, settings.bits, settings.quantization_group)
