"""Finds gated parts, activation(gate) * up and a product with that, by the structure of their modules.

One of linear modules, or those of all experts in 3-D tensors.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from paged_kernels.program import Activation
from worker_svc.model.fused.behaviour import ACTIVATIONS, activation_form, gate_form
from worker_svc.model.fused.packed_linear import PackedLinear

LANES = 16
"""Columns of a panel of packed weights; see `part` of packed_linear.py."""


@dataclass(frozen=True, slots=True)
class GatedPart:
    """A module with gate, up and down projections. `gates`: names of gate and up, or of one module for both."""

    module: nn.Module
    gates: tuple[str, ...]
    activation: Activation


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """A module with the weights of all experts. `is_transposed`: these are [depth, columns]."""

    module: nn.Module
    activation: Activation
    is_transposed: bool

    def matrix(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weights "gate_up_proj" or "down_proj" of all experts, one below the other: [columns of all, depth], and biases."""
        weight, bias = getattr(self.module, name), getattr(self.module, f"{name}_bias", None)
        whole = weight.transpose(1, 2) if self.is_transposed else weight
        return whole.reshape(-1, whole.shape[2]), None if bias is None else bias.reshape(-1)

    def computed(self, row: torch.Tensor, expert: int) -> torch.Tensor:
        """The result of an expert for a row, from its weights."""
        gate, up = self._linear("gate_up_proj", row, expert).chunk(2, -1)
        return self._linear("down_proj", ACTIVATIONS[self.activation](gate) * up, expert)

    def _linear(self, name: str, row: torch.Tensor, expert: int) -> torch.Tensor:
        weight, bias = getattr(self.module, name)[expert], getattr(self.module, f"{name}_bias", None)
        weight = weight.T if self.is_transposed else weight
        return functional.linear(row, weight, None if bias is None else bias[expert])


def gated_part(module: nn.Module | None) -> GatedPart | None:
    """The parts of a gated module; None unless gate and up are whole panels each, also where one module computes both."""
    if module is None:
        return None
    names = linear_names(module, ("gate_proj", "up_proj"), ("gate_up_proj",), last="down_proj")
    activation = activation_form(getattr(module, "act_fn", getattr(module, "activation_fn", None)))
    if not names or activation is None or sum(getattr(module, name).out_features for name in names) % (2 * LANES):
        return None
    return GatedPart(module, names, activation)


def expert_parts(module: nn.Module | None) -> ExpertParts | None:
    """Experts as `use_experts_implementation` of transformers describes them; None if they are others."""
    weights = {"gate_up_proj", "down_proj"}
    own = dict(module.named_parameters()) if module is not None else {}
    if (
        module is None
        or not weights <= own.keys() <= weights | {f"{name}_bias" for name in weights}
        or _is_changed(module)
    ):
        return None
    stated = [getattr(module, name, None) for name in ("has_gate", "is_concatenated", "has_post_expert_norm")]
    activation = gate_form(getattr(module, "_apply_gate", None))
    if stated != [True, True, False] or activation is None or own["gate_up_proj"].ndim != 3:
        return None
    found = ExpertParts(module, activation, bool(getattr(module, "is_transposed", False)))
    number, *up_shape = own["gate_up_proj"].shape
    _, *down_shape = own["down_proj"].shape
    (columns, width), (results, inner) = (
        shape[:: -1 if found.is_transposed else 1] for shape in (up_shape, down_shape)
    )
    fits = (columns, results, number) == (2 * inner, width, module.num_experts)
    return found if fits and width % LANES == inner % LANES == 0 else None


def _is_changed(experts: nn.Module) -> bool:
    """True if these are one rank's part of the experts, or what they are given or return is changed by hooks."""
    hooks = experts._forward_hooks or experts._forward_pre_hooks
    return bool(getattr(experts, "_is_expert_parallel", False) or hooks)


def linear_names(owner: nn.Module, *choices: tuple[str, ...], last: str) -> tuple[str, ...]:
    """The first choice that has all its linear modules, with no other weights but `last` and head norms; else empty."""
    for names in choices:
        modules = [getattr(owner, name, None) for name in (*names, last)]
        if (
            all(type(module) in {nn.Linear, PackedLinear} for module in modules)
            and _even(modules[:-1])
            and _no_more(owner, (*names, last))
        ):
            return names
    return ()


def _even(linears: Iterable[nn.Module | None]) -> bool:
    return all(isinstance(linear, nn.Linear | PackedLinear) and linear.out_features % LANES == 0 for linear in linears)


def _no_more(owner: nn.Module, names: tuple[str, ...]) -> bool:
    with_weights = {name.split(".", 1)[0] for name, _ in owner.named_parameters()}
    return with_weights <= {*names, "q_norm", "k_norm"}
