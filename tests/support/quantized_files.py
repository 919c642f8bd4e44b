"""Tiny checkpoints with quantized weights, laid out as llm-compressor, AutoAWQ, GPTQModel and DeepSeek's tools write them.

The packing is written bit by bit from these formats' descriptions, and shares nothing with the code under test.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Pack = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""From a weight [columns, depth] to its tensors by their names below the module, and the weight that these stand for."""
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass(frozen=True, slots=True)
class Stored:
    """A form of storage. `config`: quantization_config."""

    pack: Pack
    config: Mapping[str, Any]


def stored_so(
    source: Path, target: Path, stored: Stored, *, keeps: tuple[str, ...] = ("lm_head",), **config: Any
) -> Path:
    """The checkpoint `source` with its linear weights stored so, in `target`; `source` gets the values that they stand for.

    Embedding, norms and modules named in `keeps` stay as they are. `config`: fields of config.json.
    """
    tensors = load_file(source / "model.safetensors")
    kept, meant = {}, {}
    for name, value in tensors.items():
        if value.ndim != 2 or "embed" in name or ".mlp.gate." in name or any(part in name for part in keeps):
            kept[name] = meant[name] = value
            continue
        packed, values = stored.pack(value.float())
        kept |= {f"{name.removesuffix('weight')}{part}": tensor.contiguous() for part, tensor in packed.items()}
        meant[name] = values.to(value.dtype).contiguous()
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, source / "model.safetensors", metadata={"format": "pt"})
    return set_config(target, **({"quantization_config": stored.config} | config))


def set_config(path: Path, **fields: Any) -> Path:
    """Set fields of a folder's config.json."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return path


# --- integers ---------------------------------------------------------------------------------------------------------


def rounded(weight: torch.Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Numbers from 0 [columns, depth], scales in float16 and zero points [columns, groups], and the values meant."""
    columns, depth = weight.shape
    groups, most = weight.unflatten(1, (-1, group)), 2**bits - 1
    if symmetric:
        scales = (groups.abs().amax(2) / (most // 2)).half()
        zeros = torch.full_like(scales, 2 ** (bits - 1)).int()
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = ((high - low) / most).half()
        zeros = torch.round(-low / scales.float()).clamp(0, most).int()
    numbers = torch.round(groups / scales.float()[:, :, None]) + zeros[:, :, None]
    numbers = numbers.clamp(0, most).int()
    meant = (numbers - zeros[:, :, None]) * scales.float()[:, :, None]
    return numbers.view(columns, depth), scales, zeros, meant.view(columns, depth)


def words(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Numbers [n, m] to int32 words along the second dimension. `order`: number of a word at each place."""
    per_word = 32 // bits
    given = numbers.numpy().astype(np.uint64)
    given = np.pad(given, ((0, 0), (0, -given.shape[1] % per_word)))
    out = np.zeros((given.shape[0], given.shape[1] // per_word), np.uint64)
    for column in range(out.shape[1]):
        for place in range(per_word):
            number = given[:, column * per_word + (order[place] if order else place)]
            out[:, column] |= number << np.uint64(place * bits)
    return torch.from_numpy(out.astype(np.uint32).view(np.int32))


def gptq(bits: int, group: int, *, sym: bool, v2: bool = False, act_order: bool = False) -> Stored:
    """As GPTQModel writes it; `act_order`: groups in an order of their own."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        depth = weight.shape[1]
        size = depth if group == -1 else group
        order = (
            torch.randperm(depth, generator=torch.Generator().manual_seed(depth)) if act_order else torch.arange(depth)
        )
        numbers, scales, zeros, meant = rounded(weight[:, order], bits, size, symmetric=sym)
        back = order.argsort()
        packed_zeros = words(zeros.T.contiguous(), bits)
        if not v2:
            packed_zeros = packed_zeros - int("01" * 4 if bits == 8 else "1" * 8, 16)
        return {
            "qweight": words(numbers[:, back], bits).T,
            "qzeros": packed_zeros,
            "scales": scales.T,
            "g_idx": (torch.arange(depth) // size)[back].int(),
        }, meant[:, back]

    config = {
        "bits": bits, "group_size": group, "desc_act": act_order, "sym": sym, "lm_head": False, "quant_method": "gptq",
        "checkpoint_format": "gptq_v2" if v2 else "gptq", "pack_dtype": "int32",
        "meta": {"quantizer": ["gptqmodel:2.2.0"], "damp_percent": 0.01, "static_groups": False, "true_sequential": True},
    }  # fmt: skip
    return Stored(pack, config)


def awq(group: int) -> Stored:
    """As AutoAWQ's GEMM version writes it."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        numbers, scales, zeros, meant = rounded(weight, 4, group, symmetric=False)
        tensors = {"qweight": words(numbers.T, 4, order), "qzeros": words(zeros.T, 4, order), "scales": scales.T}
        return tensors, meant

    config = {
        "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None,
    }  # fmt: skip
    return Stored(pack, config)


# --- compressed-tensors -----------------------------------------------------------------------------------------------


def compressed(form: str, activations: Mapping[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """A quantization_config with one group, as compressed-tensors 0.20 writes it."""
    shared = {"group_size": None, "dynamic": False, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": shared | weights,
        "input_activations": activations,
        "output_activations": None,
        "format": form,
    }
    return {
        "config_groups": {"group_0": group}, "quant_method": "compressed-tensors", "kv_cache_scheme": None, "format": form,
        "quantization_status": "compressed", "global_compression_ratio": None, "ignore": ["lm_head"], "version": "0.20.0",
        "sparsity_config": {}, "transform_config": {},
    }  # fmt: skip


def pack_quantized(
    bits: int, group: int | None, *, symmetric: bool = True, scale_dtype: torch.dtype = torch.bfloat16
) -> Stored:
    """W4A16 and W8A16. `group` None: one scale for a column."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        size = group or weight.shape[1]
        numbers, scales, zeros, _ = rounded(weight, bits, size, symmetric=symmetric)
        scales = scales.to(scale_dtype)
        tensors = {
            "weight_packed": words(numbers, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T, bits).T
        return tensors, _meant(numbers, zeros, scales, size)

    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    config = compressed("pack-quantized", num_bits=bits, type="int", symmetric=symmetric, **strategy)
    return Stored(pack, config)


def int_quantized(*, symmetric: bool = True, strategy: str = "channel") -> Stored:
    """W8A8 with activations rounded as they come."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        given = weight if strategy == "channel" else weight.reshape(1, -1)
        numbers, scales, zeros, _ = rounded(given, 8, given.shape[1], symmetric=symmetric)
        meant = _meant(numbers, zeros, scales, given.shape[1]).view_as(weight)
        tensors = {"weight": (numbers - 128).to(torch.int8).view_as(weight), "weight_scale": scales.float()}
        if not symmetric:
            tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return {name: tensor if tensor.numel() > 1 else tensor.view(1) for name, tensor in tensors.items()}, meant

    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return Stored(
        pack, compressed("int-quantized", activations, num_bits=8, type="int", strategy=strategy, symmetric=symmetric)
    )


def _meant(numbers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    values = (numbers.unflatten(1, (-1, group)) - zeros[:, :, None]) * scales.float()[:, :, None]
    return values.flatten(1)


def float_quantized(block: tuple[int, int], **fields: Any) -> Stored:
    """FP8 with a scale for each block of columns and depths; 0 = all."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        numbers, scales, meant = fp8(weight, block)
        return {"weight": numbers, "weight_scale": scales.reshape(1) if block == (0, 0) else scales}, meant

    strategy = {(0, 0): "tensor", (1, 0): "channel"}.get(block, "block")
    more = {"block_structure": list(block)} if strategy == "block" else {}
    activations = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    given = {"num_bits": 8, "type": "float", "strategy": strategy, **more, **fields}
    return Stored(pack, compressed("float-quantized", activations, **given))


def fp8_blocks(block: tuple[int, int] | None, **fields: Any) -> Stored:
    """As DeepSeek's and Qwen's checkpoints store it; None: one scale for a matrix."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        numbers, scales, meant = fp8(weight, block or (0, 0))
        return {"weight": numbers, "weight_scale_inv": scales if block else scales.reshape(())}, meant

    size = None if block is None else list(block)
    config = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": size,
        "modules_to_not_convert": ["lm_head"], **fields,
    }  # fmt: skip
    return Stored(pack, config)


def fp8_static() -> Stored:
    """As AutoFP8 stores it: one scale for a matrix, and one for its rows."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        numbers, scales, meant = fp8(weight, (0, 0))
        return {"weight": numbers, "weight_scale": scales.reshape(()), "input_scale": torch.tensor(0.02)}, meant

    return Stored(pack, {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]})


def fp8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, scales [blocks, blocks] and the values meant; blocks at the end may be smaller."""
    rows, group = (size or whole for size, whole in zip(block, weight.shape, strict=True))
    numbers, meant = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // group))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * rows, (i + 1) * rows), slice(j * group, (j + 1) * group)
            scales[i, j] = weight[place].abs().amax() / 448
            numbers[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[place] = numbers[place].float() * scales[i, j]
    return numbers, scales, meant


def fp4(group: int) -> Stored:
    """MXFP4 in groups of 32, with exponents as scales; NVFP4 in groups of 16, with FP8 scales and one for the matrix."""
    is_mx = group == 32

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = weight.unflatten(1, (-1, group))
        largest = groups.abs().amax(2)
        tensors: Tensors = {}
        if is_mx:
            exponents = torch.floor(torch.log2(largest / 4)).int()
            scales, tensors["weight_scale"] = 2.0**exponents, (exponents + 127).to(torch.uint8)
        else:
            whole = 448 * 6 / largest.amax()
            stored = (largest / 6 * whole).to(torch.float8_e4m3fn)
            tensors |= {"weight_scale": stored, "weight_global_scale": whole.view(1)}
            scales = stored.float() / whole
        near = (groups.abs() / scales[:, :, None]).clamp(max=6)
        index = (near[..., None] - _FP4).abs().argmin(-1)
        meant = _FP4[index] * groups.sign() * scales[:, :, None]
        codes = (index | (groups < 0).int() * 8).flatten(1)
        tensors["weight_packed"] = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
        return tensors, meant.flatten(1)

    form, strategy = ("mxfp4-pack-quantized", "group") if is_mx else ("nvfp4-pack-quantized", "tensor_group")
    scale = "torch.uint8" if is_mx else "torch.float8_e4m3fn"
    return Stored(
        pack, compressed(form, num_bits=4, type="float", strategy=strategy, group_size=group, scale_dtype=scale)
    )
