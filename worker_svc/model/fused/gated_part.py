"""Finds gated parts, activation(gate) * up and a product with that, by the structure of their modules."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from paged_kernels.decoder import Activation
from worker_svc.model.fused.behaviour import activation_form
from worker_svc.model.fused.packed_linear import PackedLinear

LANES = 16
"""Columns of a panel of packed weights; see `part` of packed_linear.py."""


@dataclass(frozen=True, slots=True)
class GatedPart:
    """A module with gate, up and down projections. `gates`: names of gate and up, or of one module for both."""

    module: nn.Module
    gates: tuple[str, ...]
    activation: Activation


def gated_part(module: nn.Module | None) -> GatedPart | None:
    """The parts of a gated module; None unless gate and up are whole panels each, also where one module computes both."""
    if module is None:
        return None
    names = linear_names(module, ("gate_proj", "up_proj"), ("gate_up_proj",), last="down_proj")
    activation = activation_form(getattr(module, "act_fn", getattr(module, "activation_fn", None)))
    if not names or activation is None or sum(getattr(module, name).out_features for name in names) % (2 * LANES):
        return None
    return GatedPart(module, names, activation)


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
