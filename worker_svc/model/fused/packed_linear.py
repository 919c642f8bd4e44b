"""Linear modules with packed weights, in place of the plain copy. Their layout: `paged_kernels.weight_packing`."""

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from paged_kernels.decoder import DecoderKernels
from paged_kernels.host_memory import CleanFilePages
from paged_kernels.program import PackedWeights
from paged_kernels.quantized import QuantizedWeight, dense, joined
from svc_common.errors import ConfigError

WeightOf = Callable[[nn.Linear], torch.Tensor | QuantizedWeight]
"""The weight of a linear module in the form in which it is to be packed."""


class WeightOutline(torch.Tensor):
    """Shape and dtype of packed weights. Everything else raises ConfigError: torch computes with meta tensors in silence."""

    _READ = frozenset(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "ndim"))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in cls._READ or func in {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel}:
                return func(*args, **(kwargs or {}))
        raise ConfigError(
            "a module of this model computes with the weight of a linear module inside it, and weights are packed: set --no-fuse",
            reason="MODEL_UNSUPPORTED",
        )


class PackedLinear(nn.Module):
    """Replaces an `nn.Linear`. `keeps_row_bits`: of the kernels; see invariance.py."""

    def __init__(
        self,
        kernels: DecoderKernels,
        weights: PackedWeights,
        *,
        wide: bool = False,
        whole: PackedWeights | None = None,
    ) -> None:
        """`wide`: return float32, with the same values. `whole`: what `weights` is a part of, by default itself."""
        super().__init__()
        self._kernels, self.weights, self._wide = kernels, weights, wide
        self.keeps_row_bits = kernels.keeps_row_bits
        self.whole = weights if whole is None else whole
        self.in_features, self.out_features = weights.depth, weights.columns

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        return self._kernels.linear(rows, self.weights, wide=self._wide)

    @property
    def weight(self) -> torch.Tensor:
        """Shape and dtype only, [out_features, in_features], for models that ask a linear module for them."""
        shape = (self.out_features, self.in_features)
        return torch.empty(shape, dtype=self.weights.dtype, device="meta").as_subclass(WeightOutline)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and bias."""
        return self.weights.num_bytes


def put_in_place(parent: nn.Module, name: str, module: PackedLinear) -> None:
    """Replace the module `name` of `parent`; its forward hooks go on."""
    module._forward_hooks.update(getattr(parent, name)._forward_hooks)
    setattr(parent, name, module)


def plain_weight(linear: nn.Linear) -> torch.Tensor:
    """The `WeightOf` that packs weights as they are."""
    return linear.weight


def packed(kernels: DecoderKernels, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None) -> PackedWeights:
    """Pack weights [columns, depth]; dequantized if the kernels do not multiply with quantized ones."""
    if isinstance(weight, QuantizedWeight) and not kernels.packs_quantized(weight.dtype, weight.numbers.dtype):
        weight = dense(weight)
    return kernels.pack(weight, bias)


def merged(kernels: DecoderKernels, linears: list[nn.Linear], weight_of: WeightOf = plain_weight) -> PackedWeights:
    """Pack several modules that read the same rows into one matrix, side by side."""
    return packed(kernels, joined([weight_of(linear) for linear in linears]), joint_bias(linears))


def joint_bias(linears: list[nn.Linear]) -> torch.Tensor | None:
    """Biases side by side, zeros for modules without; None if none has one."""
    biased = any(linear.bias is not None for linear in linears)
    return torch.cat([_bias(linear) for linear in linears]) if biased else None


def packed_together(modules: Sequence[nn.Module]) -> PackedWeights:
    """The matrix that these packed modules, in order, are views of."""
    views_of = [module for module in modules if isinstance(module, PackedLinear)]
    whole = views_of[0].whole
    assert all(view.whole is whole for view in views_of)
    assert sum(view.out_features for view in views_of) == whole.columns
    return whole


def views(
    kernels: DecoderKernels, whole: PackedWeights, columns: Sequence[int], *, wide: bool = False
) -> list[PackedLinear]:
    """Modules of this many columns each, side by side in `whole`."""
    begins = accumulate(columns, initial=0)
    parts = [
        whole if count == whole.columns else part(whole, begin, count)
        for begin, count in zip(begins, columns, strict=False)
    ]
    return [PackedLinear(kernels, weights, wide=wide, whole=whole) for weights in parts]


def _bias(linear: nn.Linear) -> torch.Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias


def part(whole: PackedWeights, begin: int, columns: int) -> PackedWeights:
    """A view of `columns` columns from `begin` on, both multiples of 16; shares the memory."""
    column_bytes = whole.data.nbytes // whole.columns
    data = whole.data[begin * column_bytes : (begin + columns) * column_bytes]
    bias = None if whole.bias is None else whole.bias[begin : begin + columns]
    return PackedWeights(columns, whole.depth, whole.dtype, data, bias, whole.form)


def pack_all(
    model: nn.Module,
    kernels: DecoderKernels,
    head: nn.Module | None,
    weight_of: WeightOf = plain_weight,
    pages: CleanFilePages = CleanFilePages(),  # noqa: B008  (frozen)
    kept: Collection[nn.Module] = (),
) -> None:
    """Replace every remaining `nn.Linear` by a `PackedLinear`; `head`, which computes logits, becomes a wide one.

    `pages`: of mapped checkpoints; those of packed weights are dropped. `kept`: modules that stay as they are.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child not in kept and kernels.packs(child.weight.dtype, child.in_features):
                weights = packed(kernels, weight_of(child), child.bias)
                put_in_place(parent, name, PackedLinear(kernels, weights, wide=child is head))
                pages.drop(child.weight)
