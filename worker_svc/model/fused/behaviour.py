"""Identifies what modules compute by running them.

Names differ between models, and equal names may compute different things.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paged_kernels.program import Activation

_ROWS = 3
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class NormForm:
    """x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight)."""

    weight: torch.Tensor
    eps: float
    one_plus: bool


def norm_form(module: nn.Module | None) -> NormForm | None:
    """The form of a norm; None if it is of another kind."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if module is None or weight is None or eps is None or weight.ndim != 1 or getattr(module, "bias", None) is not None:
        return None
    x = torch.randn(_ROWS, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    found = module(x).float()
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    for one_plus in (False, True):
        expected = normed * (weight.float() + one_plus)
        if _close(found, expected, weight.dtype):
            return NormForm(weight, float(eps), one_plus)
    return None


def activation_form(function: Any) -> Activation | None:
    """The activation that `function` computes; None if it is not a known one.

    Compared in float32: shorter types cannot tell the forms of GELU apart.
    """
    if not callable(function):
        return None
    x = torch.linspace(-8, 8, 129)
    found = function(x)
    return next((name for name, ours in ACTIVATIONS.items() if _close(found, ours(x), x.dtype)), None)


def gate_form(function: Any) -> Activation | None:
    """The activation with which `function` maps gate and up values side by side to activation(gate) * up; None if another."""
    if not callable(function):
        return None
    gate = torch.linspace(-8, 8, 128)
    up = gate.roll(37) + 1
    found = function(torch.cat([gate, up])[None])[0]
    return next((name for name, ours in ACTIVATIONS.items() if _close(found, ours(gate) * up, gate.dtype)), None)


def _close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    tolerance = _TOLERANCES.get(dtype, 0.0)
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=tolerance, atol=tolerance)
