"""Linear modules with packed weights, in place of the plain copy."""

import torch
from torch import nn

from paged_kernels.decoder import DecoderKernels, PackedWeights, Stored


class PackedLinear(nn.Module):
    """Replaces an `nn.Linear`. A row's bits depend only on the row (`keeps_row_bits`, see invariance.py)."""

    keeps_row_bits = True

    def __init__(self, kernels: DecoderKernels, weights: PackedWeights, *, wide: bool = False) -> None:
        """`wide`: return float32, with the same values."""
        super().__init__()
        self._kernels, self.weights, self._wide = kernels, weights, wide
        self.in_features, self.out_features = weights.depth, weights.columns

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        return self._kernels.linear(rows, self.weights, wide=self._wide)

    @property
    def weight(self) -> torch.Tensor:
        """Shape and dtype only: [out_features, in_features] on the meta device.

        For models that ask a linear module for them; torch refuses to compute with it.
        """
        return torch.empty(self.out_features, self.in_features, dtype=self.weights.dtype, device="meta")

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, scales and bias."""
        return self.weights.num_bytes

    def extra_repr(self) -> str:
        """Description for torch's `repr`."""
        return f"{self.in_features}, {self.out_features}, packed, {self.weights.stored}"


def packed(kernels: DecoderKernels, weight: torch.Tensor, bias: torch.Tensor | None, stored: Stored) -> PackedWeights:
    """Pack weights [columns, depth] in the given storage form, or plain if their depth does not allow it."""
    fits = kernels.packs(weight.dtype, weight.shape[1], stored)
    return kernels.pack(weight, bias, stored=stored if fits else "plain")


def merged(kernels: DecoderKernels, linears: list[nn.Linear], stored: Stored = "plain") -> PackedWeights:
    """Pack several modules that read the same rows into one matrix, side by side."""
    biased = any(linear.bias is not None for linear in linears)
    bias = torch.cat([_bias(linear) for linear in linears]) if biased else None
    return packed(kernels, torch.cat([linear.weight for linear in linears]), bias, stored)


def _bias(linear: nn.Linear) -> torch.Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias


def part(whole: PackedWeights, begin: int, columns: int) -> PackedWeights:
    """A view of `columns` columns from `begin` on, both multiples of 16; shares the memory."""
    column_bytes = whole.data.nbytes // whole.columns
    data = whole.data[begin * column_bytes : (begin + columns) * column_bytes]
    bias, scales = (
        None if tensor is None else tensor[begin : begin + columns] for tensor in (whole.bias, whole.scales)
    )
    return PackedWeights(columns, whole.depth, whole.dtype, data, bias, scales)


def pack_all(model: nn.Module, kernels: DecoderKernels, head: nn.Module | None, stored: Stored = "plain") -> None:
    """Replace every remaining `nn.Linear` by a `PackedLinear`; `head`, which computes logits, becomes a wide one."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and kernels.packs(child.weight.dtype, child.in_features):
                weights = packed(kernels, child.weight, child.bias, stored)
                setattr(parent, name, PackedLinear(kernels, weights, wide=child is head))
