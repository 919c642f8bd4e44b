"""Finds the modules of a decoder by their structure: a chain of attention and gated layers, or mixtures, around one stream.

Model names play no role. A match is no proof: `fuse_tried` compares results before the match is relied on.
"""

import inspect
from dataclasses import dataclass

from torch import nn

from worker_svc.model.fused.behaviour import NormForm, norm_form
from worker_svc.model.fused.elsewhere import Elsewhere, StageArrival
from worker_svc.model.fused.gated_part import GatedPart, gated_part, linear_names
from worker_svc.model.fused.mixture_parts import MixtureParts, mixture_parts


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of attention or the gated part.

    `before`: of its input. `after`: of its result, before that is added to the stream; None if absent.
    """

    before: NormForm
    after: NormForm | None


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Modules of one layer.

    `projections`: names of the linear modules for queries, keys and values, or of one for all.
    """

    module: nn.Module
    attention: nn.Module
    projections: tuple[str, ...]
    mlp: GatedPart | MixtureParts
    around_attention: Norms
    around_mlp: Norms
    head_norms: tuple[NormForm, ...]
    """Norms of each query and of each key, or none."""


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """A decoder: embedding, layers, last norm.

    Of a stage its layers, from `first_layer` on: `embedding` is None unless it is the first stage, `last_norm` unless it is the
    last.
    """

    embedding: nn.Embedding | None
    layers: tuple[LayerParts, ...]
    last_norm: NormForm | None
    first_layer: int = 0

    @property
    def norm(self) -> NormForm:
        """A norm of the stream."""
        return self.layers[0].around_attention.before


def match(decoder: nn.Module, *, mixes: bool) -> DecoderParts | None:
    """The parts of a decoder; None if its structure is not known. `mixes`: it may have mixtures of experts."""
    layers, embedding = getattr(decoder, "layers", None), getattr(decoder, "embed_tokens", None)
    last_norm = norm_form(getattr(decoder, "norm", None))
    if not isinstance(layers, nn.ModuleList) or last_norm is None:
        return None
    is_first, is_last = not isinstance(layers[0], StageArrival), not isinstance(layers[-1], Elsewhere)
    if is_first and not isinstance(embedding, nn.Embedding):
        return None
    if len({parameter.dtype for parameter in decoder.parameters()}) > 1:
        return None
    own = [number for number, layer in enumerate(layers) if not isinstance(layer, Elsewhere)]
    found = [_layer(layers[number], mixes=mixes) for number in own]
    whole = tuple(layer for layer in found if layer is not None)
    if len(whole) != len(found):
        return None
    return DecoderParts(embedding if is_first else None, whole, last_norm if is_last else None, own[0])


def _layer(layer: nn.Module, *, mixes: bool) -> LayerParts | None:
    children = dict(layer.named_children())
    attention, mlp, norms = children.pop("self_attn", None), children.pop("mlp", None), _norms(children)
    if attention is None or mlp is None or norms is None or _counts(attention) or _weighs(layer):
        return None
    projections = linear_names(attention, ("q_proj", "k_proj", "v_proj"), ("qkv_proj",), last="o_proj")
    inner, head_norms = gated_part(mlp) or (mixture_parts(mlp) if mixes else None), _head_norms(attention)
    if not projections or inner is None or head_norms is None:
        return None
    return LayerParts(layer, attention, projections, inner, *norms, head_norms)


def _counts(attention: nn.Module) -> bool:
    """True if attention uses positions themselves and not only angles.

    Its results may then differ at far positions, which no trial reaches.
    """
    return "position_ids" in inspect.signature(attention.forward).parameters


def _weighs(layer: nn.Module) -> bool:
    """True if the layer has a factor of its own, as Granite's residuals: in bfloat16 a trial may not notice one near 1."""
    return any(isinstance(value, float) and value not in (0.0, 1.0) for value in vars(layer).values())


def _norms(children: dict[str, nn.Module]) -> tuple[Norms, Norms] | None:
    """Norms of attention and gated part, two or four in all. Modules without weights between them (dropout) are ignored."""
    named = {name: child for name, child in children.items() if any(True for _ in child.parameters())}
    forms = {name: norm_form(child) for name, child in named.items()}
    before, between = forms.get("input_layernorm"), forms.get("post_attention_layernorm")
    if before is None or between is None or None in forms.values():
        return None
    if forms.keys() == {"input_layernorm", "post_attention_layernorm"}:
        return Norms(before, None), Norms(between, None)
    inner, last = forms.get("pre_feedforward_layernorm"), forms.get("post_feedforward_layernorm")
    if inner is None or last is None or len(forms) > 4:
        return None
    return Norms(before, between), Norms(inner, last)


def _head_norms(attention: nn.Module) -> tuple[NormForm, ...] | None:
    """Norms of queries and keys; empty if there are none, None if their kind is not known."""
    modules = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if modules == [None, None]:
        return ()
    forms = [form for form in map(norm_form, modules) if form is not None]
    same = len(forms) == len(modules) and len({(form.eps, form.one_plus) for form in forms}) == 1
    return tuple(forms) if same else None
