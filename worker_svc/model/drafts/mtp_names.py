"""Where checkpoints keep the weights of a model's MTP head, as data. Layouts as in vLLM, SGLang and transformers' `MtpModel`."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

_SHARED = ("shared_head.head.", "embed_tokens.")
"""Copies of the model's own embedding and output head."""


@dataclass(frozen=True, slots=True)
class MtpNames:
    """Names of one layout, without ".weight".

    `prefix`: of all of them; `{n}` stands for the number of the model's layers. `block`: of the decoder layer, after
    `prefix`. `renamed`: modules of the layer that have another name in transformers' class. `attention`: the layer's type, None =
    that of the model's last layer.
    """

    prefix: str
    embed_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    block: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    attention: str | None = None

    def of(self, part: str, num_layers: int) -> str:
        """The whole name of a weight."""
        return f"{self.prefix.format(n=num_layers)}{part}.weight"

    def layer_weights(self, names: Collection[str], num_layers: int) -> dict[str, str]:
        """Names in a causal model of one layer, by names in the checkpoint, of the layer and of the final norm."""
        prefix = self.prefix.format(n=num_layers)
        own = tuple(f"{prefix}{part}." for part in self._parts)
        found = {}
        for name in names:
            if name.startswith(prefix + self.block) and not name.startswith(own):
                rest = name.removeprefix(prefix + self.block)
                for before, after in self.renamed.items():
                    rest = rest.replace(before, after)
                found[name] = f"model.layers.0.{rest}"
        return found | {self.of(self.final_norm, num_layers): "model.norm.weight"}

    @property
    def _parts(self) -> tuple[str, ...]:
        shared = tuple(name.removesuffix(".") for name in _SHARED)
        return (self.embed_norm, self.hidden_norm, self.projection, self.final_norm, *shared)


LAYOUTS = (
    # DeepSeek-V3, GLM-4.5 and later
    MtpNames("model.layers.{n}.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    # MiMo-V2-Flash, of which the first of several heads is used, as in vLLM
    MtpNames(
        "model.mtp.layers.0.",
        "enorm",
        "hnorm",
        "eh_proj",
        "final_layernorm",
        renamed={"pre_mlp_layernorm": "post_attention_layernorm"},
        attention="sliding_attention",
    ),
    # Qwen3-Next, Qwen3.5
    MtpNames(
        "mtp.",
        "pre_fc_norm_embedding",
        "pre_fc_norm_hidden",
        "fc",
        "norm",
        block="layers.0.",
        attention="full_attention",
    ),
)


def layout_of(names: Collection[str], num_layers: int) -> MtpNames | None:
    """The layout of a checkpoint with tensors of these names; None if it has no MTP head that is known."""
    return next((layout for layout in LAYOUTS if layout.of(layout.projection, num_layers) in names), None)


def one_layer_settings(config: Mapping[str, Any], layout: MtpNames, *, has_experts: bool) -> dict[str, Any]:
    """Fields of a configuration that differ for a model of the head's layer alone, without an embedding of its own."""
    num_layers = config["num_hidden_layers"]
    per_layer = {
        name: value[-1:] for name, value in config.items() if isinstance(value, list) and len(value) == num_layers
    }
    kinds = {
        "layer_types": [layout.attention],
        "mlp_layer_types": ["sparse" if has_experts else "dense"],
        "first_k_dense_replace": 0 if has_experts else 1,
        "mlp_only_layers": [] if has_experts else [0],
        "decoder_sparse_step": 1,
    }
    if layout.attention is None:
        del kinds["layer_types"]
    set_here = {name: value for name, value in kinds.items() if config.get(name) is not None}
    size = {"num_hidden_layers": 1, "vocab_size": 1, "pad_token_id": None, "tie_word_embeddings": False}
    return per_layer | set_here | size
