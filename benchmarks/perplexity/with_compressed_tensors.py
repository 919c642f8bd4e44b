"""The package compressed-tensors stores or converts a checkpoint, and its perplexity is computed; run in its own environment.

    python -m benchmarks.perplexity.with_compressed_tensors SOURCE TARGET WINDOWS SCHEME
    python -m benchmarks.perplexity.with_compressed_tensors SOURCE TARGET WINDOWS

SCHEME: JSON, {"preset": a name of the package, "weights": {changed arguments}, "ignore": [modules]}; the checkpoint is
stored in TARGET with scales from the extremes of the weights. Without it SOURCE is a checkpoint of AutoAWQ or with blocks
of FP8, which the package converts. The package dequantizes the weights to float32; with "rounds_activations": true
transformers runs the stored checkpoint instead, rounding activations as the scheme asks (it cannot load all schemes).
WINDOWS: JSON file. The last line of standard output is the perplexity.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.entrypoints.convert import convert_checkpoint
from compressed_tensors.entrypoints.convert.converters import (
    AutoAWQConverter,
    CompressedTensorsDequantizer,
    FP8BlockDequantizer,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM

from benchmarks.perplexity.reference import perplexity


def store(source: Path, target: Path, given: dict[str, Any]) -> None:
    """Write the checkpoint with its linear weights, except the output layer's, in the scheme."""
    scheme = preset_name_to_scheme(given["preset"], ["Linear"])
    scheme.weights = QuantizationArgs(**(scheme.weights.model_dump() | given.get("weights", {})))
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    ignored = ["lm_head", *given.get("ignore", [])]
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=ignored))
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            set_scales(module, scheme.weights)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(target)
    compressor.update_config(target)
    for file in source.glob("tokenizer*"):
        (target / file.name).write_bytes(file.read_bytes())


def set_scales(module: torch.nn.Module, args: QuantizationArgs) -> None:
    """Set a module's scales, zero points and global scale."""
    low, high = extremes(module.weight.data, args)
    whole = None
    if args.strategy == "tensor_group":
        whole = generate_gparam(low.amin(), high.amax())
        module.weight_global_scale.data.copy_(whole)
    scales, zeros = calculate_qparams(low, high, args, whole)
    module.weight_scale.data = scales.reshape(module.weight_scale.shape).to(module.weight_scale.dtype)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data = zeros.reshape(module.weight_scale.shape).to(module.weight_zero_point.dtype)


def extremes(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Minimum and maximum of each block of the weight with a scale of its own: [blocks of columns, blocks of depths]."""
    columns, depth = weight.shape
    blocks = {"tensor": (columns, depth), "channel": (1, depth), "block": args.block_structure}
    rows, group = blocks.get(args.strategy, (1, args.group_size))
    padded = pad(weight, (0, -depth % group, 0, -columns % rows))
    parts = padded.unflatten(1, (-1, group)).unflatten(0, (-1, rows))
    return parts.amin((1, 3)), parts.amax((1, 3))


def convert(source: Path, target: Path) -> None:
    """Write the checkpoint in the format of compressed-tensors (AWQ) or without quantization (FP8)."""
    config = json.loads((source / "config.json").read_text())["quantization_config"]
    if config["quant_method"] == "awq":
        converter = AutoAWQConverter.from_autoawq_config(config)
    else:
        block = tuple(config["weight_block_size"])
        converter = FP8BlockDequantizer.from_pretrained(source, weight_block_size=block, dtype=torch.float32)
    convert_checkpoint(source, target, converter)


def dequantized(stored: Path) -> Path:
    """A checkpoint with the weights that the stored ones stand for, beside it."""
    if "quantization_config" not in json.loads((stored / "config.json").read_text()):
        return stored
    plain = stored.with_name("plain")
    not_linear = ["re:.*embed_tokens", "re:.*norm"]  # the class takes each weight without "_packed" for a linear one
    convert_checkpoint(stored, plain, CompressedTensorsDequantizer(stored, not_linear, torch.float32))
    return plain


def main(source: str, target: str, windows: str, scheme: str = "{}") -> None:
    """See the module."""
    given, stored = json.loads(scheme), Path(target)
    if given:
        store(Path(source), stored, given)
    else:
        convert(Path(source), stored)
    runnable = stored if given.get("rounds_activations") else dequantized(stored)
    print(perplexity(runnable, json.loads(Path(windows).read_text())))


if __name__ == "__main__":
    main(*sys.argv[1:])
