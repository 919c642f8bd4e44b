"""Finds mixtures of experts by the structure of their modules, and what they compute by running them.

A mixture: a router, experts with weights in 3-D tensors, as `transformers` keeps them, and maybe an expert for all rows.
Names of models play no role. What a router computes is found by trying the known ways with its own weights, and that
nothing else happens by comparing the whole mixture with its parts.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import nn
from torch.nn import functional

from paged_kernels.program import Routing
from worker_svc.model.fused.gated_part import ExpertParts, GatedPart, expert_parts, gated_part
from worker_svc.model.fused.packed_linear import PackedLinear

log = logging.getLogger(__name__)

_ROWS = 16
# Of a trial's weights, and of its results relative to their norm.
_WEIGHTS_TOLERANCE = 1e-4
_RESULTS_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class MixtureParts:
    """Modules of a mixture. `router`: has a weight [experts, width] and maybe a bias. `shared`: of all rows, None if absent.

    `shared_name`, `gate_name`: names of the shared expert and of the linear module for its weight, "" if absent.
    """

    module: nn.Module
    router: nn.Module
    routing: Routing
    experts: ExpertParts
    shared: GatedPart | None
    shared_name: str
    gate_name: str
    returns_scores: bool
    """True if the module returns a tuple, of which the first element is used."""


def mixture_parts(module: nn.Module) -> MixtureParts | None:
    """The parts of a mixture; None if it is none, or does something that is not known."""
    try:
        return _mixture(module)
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
        log.info("the mixture of experts %s cannot be run in parts: %s", type(module).__name__, error)
        return None


def _mixture(module: nn.Module) -> MixtureParts | None:
    children = dict(module.named_children())
    experts = expert_parts(children.pop("experts", None))
    if experts is None or _has_hooks(module) or any(True for _ in module.parameters(recurse=False)):
        return None
    router = children.pop("gate", None) or children.pop("router", None)
    routing = None if router is None else _routing(router)
    gate_name = next((name for name in children if name == "shared_expert_gate"), "")
    gate = children.pop(gate_name, None)
    shared_name = next(iter(children), "")
    shared = gated_part(children.pop(shared_name, None))
    has_shared = shared is not None
    if (
        router is None
        or routing is None
        or children
        or has_shared != bool(shared_name)
        or (gate_name and not has_shared)
    ):
        return None
    if gate is not None and not (isinstance(gate, nn.Linear | PackedLinear) and gate.out_features == 1):
        return None
    found = MixtureParts(module, router, routing, experts, shared, shared_name, gate_name, returns_scores=False)
    return _tried(found)


# --- routers ------------------------------------------------------------------------------------------------------------


def _routing(router: nn.Module) -> Routing | None:
    """What a router computes, of the known ways with its own numbers; None if it is another one."""
    weight = getattr(router, "weight", None)
    names = {name for name, _ in router.named_parameters()}
    if (
        not isinstance(weight, torch.Tensor)
        or weight.ndim != 2
        or not names <= {"weight", "bias"}
        or _has_hooks(router)
    ):
        return None
    x = _random(_ROWS, weight.shape[1]).to(weight)
    found = _given_by(router(x), len(weight))
    if found is None:
        return None
    weights, top_k, dtype = found
    for routing in _known(router, top_k, rounds=dtype == weight.dtype):
        if torch.allclose(dense_weights(_logits(router, x, routing), routing, dtype), weights, atol=_WEIGHTS_TOLERANCE):
            return routing
    return None


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _known(router: nn.Module, top_k: int, *, rounds: bool) -> Iterator[Routing]:
    """Known ways, those first that use more of the router's numbers."""
    number, scale = len(router.weight), getattr(router, "routed_scaling_factor", 1.0)
    bias = getattr(router, "e_score_correction_bias", None)
    if bias is not None:
        bias = bias.detach().float().reshape(-1)
    groups, kept = getattr(router, "num_group", None) or 1, getattr(router, "topk_group", None) or 1
    plain = Routing(number, top_k, "softmax", normalised=False, exact=False, rounds=rounds)
    divided = [
        replace(plain, groups=groups, kept_groups=kept, best_of_group=best)
        for best in (2, 1)
        if groups > 1 and number % groups == 0 and best <= number // groups and kept <= groups
    ]
    numbers = product([*divided, plain], _distinct(bias, None), _distinct(scale, 1.0))
    for (form, own_bias, own_scale), scoring in product(numbers, ("softmax", "sigmoid")):
        for normalised, exact in product((True, False), (False, True)):
            yield replace(form, scoring=scoring, bias=own_bias, scale=own_scale, normalised=normalised, exact=exact)


def _distinct(value: object, other: object) -> tuple[object, ...]:
    return (other,) if value is other or value == other else (value, other)


def _given_by(out: object, number: int) -> tuple[torch.Tensor, int, torch.dtype] | None:
    """Weights [T, experts] of what a router returns, how many experts a row gets, and the dtype of the weights."""
    tensors = [part for part in out if isinstance(part, torch.Tensor)] if isinstance(out, tuple) else []
    chosen = [part for part in tensors if not part.is_floating_point()]
    if len(chosen) != 1 or chosen[0].ndim != 2:
        return None
    weights = [part for part in tensors if part.is_floating_point() and part.shape == chosen[0].shape]
    if len(weights) != 1:
        return None
    return _dense(weights[0], chosen[0], number), chosen[0].shape[1], weights[0].dtype


def _dense(weights: torch.Tensor, chosen: torch.Tensor, number: int) -> torch.Tensor:
    return torch.zeros(len(weights), number).scatter(1, chosen, weights.float())


def _logits(router: nn.Module, rows: torch.Tensor, routing: Routing) -> torch.Tensor:
    weight, bias = router.weight, getattr(router, "bias", None)
    if routing.exact:
        rows, weight, bias = rows.float(), weight.float(), None if bias is None else bias.float()
    return functional.linear(rows, weight, bias)


def dense_weights(logits: torch.Tensor, routing: Routing, dtype: torch.dtype) -> torch.Tensor:
    """Weights [T, experts] by `routing`, in torch; `dtype`: of the weights. Zero for experts that are not chosen."""
    wide = logits.float()
    scores = wide.softmax(-1) if routing.scoring == "softmax" else wide.sigmoid()
    keys = scores if routing.bias is None else scores + routing.bias
    if routing.groups > 1:
        of_groups = keys.unflatten(1, (routing.groups, -1))
        best = of_groups.topk(routing.best_of_group, -1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(routing.kept_groups).indices, value=True)
        keys = of_groups.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)
    chosen = keys.topk(routing.top_k).indices
    weights = scores.gather(1, chosen)
    if routing.normalised:
        weights = weights / weights.sum(1, keepdim=True)
    return _dense((weights * routing.scale).to(dtype), chosen, routing.num_experts)


# --- the whole ----------------------------------------------------------------------------------------------------------


def _tried(found: MixtureParts) -> MixtureParts | None:
    """The parts, if the mixture computes what they do."""
    width = found.router.weight.shape[1]
    x = _random(3, width).to(found.router.weight)
    out = found.module(x[None])
    made = out[0] if isinstance(out, tuple) else out
    if not isinstance(made, torch.Tensor) or made.shape != (1, *x.shape):
        return None
    expected = _computed(found, x)
    off = (made[0].float() - expected).norm() / expected.norm()
    if not off <= _RESULTS_TOLERANCES.get(x.dtype, 0.0):
        return None
    return replace(found, returns_scores=isinstance(out, tuple))


def _computed(parts: MixtureParts, rows: torch.Tensor) -> torch.Tensor:
    weights = dense_weights(_logits(parts.router, rows, parts.routing), parts.routing, torch.float32)
    made = torch.stack([_sum_of(parts.experts, row, of_row) for row, of_row in zip(rows, weights, strict=True)])
    if parts.shared is not None:
        shared = parts.shared.module(rows).float()
        gate = getattr(parts.module, parts.gate_name) if parts.gate_name else None
        made += shared if gate is None else shared * gate(rows).float().sigmoid()
    return made


def _sum_of(experts: ExpertParts, row: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return sum((experts.computed(row, int(e)).float() * weights[e] for e in weights.nonzero()), torch.zeros(len(row)))


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
