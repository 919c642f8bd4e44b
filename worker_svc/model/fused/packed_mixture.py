"""Mixtures of experts with packed weights, in place of the modules that had them."""

import torch
from torch import nn

from paged_kernels.decoder import DecoderKernels, MixtureKernels
from paged_kernels.host_memory import CleanFilePages
from paged_kernels.program import ExpertWeights, PackedWeights, Route, Rows
from worker_svc.model.fused.gated_part import ExpertParts
from worker_svc.model.fused.mixture_parts import MixtureParts, mixture_parts
from worker_svc.model.fused.packed_linear import WeightOf, packed, plain_weight


class PackedMixture(nn.Module):
    """Replaces a mixture of experts. A shared expert, and the module for its weight, keep their names in it.

    `keeps_row_bits`: of the kernels; see invariance.py.
    """

    keeps_row_bits = True

    def __init__(self, kernels: MixtureKernels, route: Route, weights: ExpertWeights, parts: MixtureParts) -> None:
        super().__init__()
        self.route, self.weights = route, weights
        self._kernels, self._returns_scores = kernels, parts.returns_scores
        self._shared_name, self._gate_name = parts.shared_name, parts.gate_name
        for name in filter(None, (parts.shared_name, parts.gate_name)):
            self.add_module(name, getattr(parts.module, name))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, None]:
        """Map [..., width] to the same shape; with None where the module in its place returned scores too."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        shared, gate = (
            self.get_submodule(name)(rows) if name else None for name in (self._shared_name, self._gate_name)
        )
        made = self._kernels.mixture(rows, self.route, self.weights, shared, gate).view_as(hidden_states)
        return (made, None) if self._returns_scores else made

    @property
    def packed(self) -> tuple[PackedWeights, ...]:
        """The packed weights of router and experts."""
        return self.route.router, self.weights.gate_up, self.weights.down

    @property
    def is_quantized(self) -> bool:
        """True if the experts' weights are."""
        return self.weights.gate_up.form.stored != "plain"


def packed_mixture(
    parts: MixtureParts, kernels: MixtureKernels, weight_of: WeightOf, pages: CleanFilePages
) -> PackedMixture:
    """Pack router and experts; their modules lose the weights.

    `weight_of`: called with the weights of all experts as one linear module.
    """
    router = parts.router
    route = Route(Rows.NORMED, kernels.pack(router.weight, getattr(router, "bias", None)), parts.routing)
    gate_up, down = (_experts(parts.experts, name, kernels, weight_of) for name in ("gate_up_proj", "down_proj"))
    for module in (router, parts.experts.module):
        for name, parameter in list(module.named_parameters()):
            pages.drop(parameter)
            delattr(module, name)  # `parts` keeps the module
    weights = ExpertWeights(gate_up, down, parts.routing.num_experts, parts.experts.activation)
    return PackedMixture(kernels, route, weights, parts)


def _experts(parts: ExpertParts, name: str, kernels: MixtureKernels, weight_of: WeightOf) -> PackedWeights:
    weight, bias = parts.matrix(name)
    linear = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return packed(kernels, weight_of(linear), bias)


def pack_mixtures(
    model: nn.Module,
    kernels: DecoderKernels,
    weight_of: WeightOf = plain_weight,
    pages: CleanFilePages = CleanFilePages(),  # noqa: B008  (frozen)
) -> None:
    """Replace every mixture that is known by a `PackedMixture`, if the kernels compute such."""
    if not isinstance(kernels, MixtureKernels):
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            parts = mixture_parts(child) if can_be_packed(child, kernels) else None
            if parts is not None:
                setattr(parent, name, packed_mixture(parts, kernels, weight_of, pages))


def can_be_packed(module: nn.Module, kernels: DecoderKernels) -> bool:
    """True if these kernels compute mixtures with the dtype of the module's weights, and the module may be one."""
    weight = getattr(getattr(module, "experts", None), "down_proj", None)
    return isinstance(weight, torch.Tensor) and isinstance(kernels, MixtureKernels) and kernels.packs(weight.dtype, 16)
