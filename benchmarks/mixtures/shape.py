"""Mixtures of experts with random weights, in the form of Qwen3-MoE, made once into the cache of checkpoints."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare import checkpoints
from benchmarks.compare.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class MixtureShape(ModelShape):
    """`intermediate_size`: of each of the `num_experts` experts in every layer, of which a token gets `top_k`."""

    num_experts: int = 32
    top_k: int = 8

    def mlp_tensors(self) -> dict[str, tuple[int, int]]:
        """See ModelShape; with the router."""
        of_one = ModelShape.mlp_tensors(self)
        experts = {f"experts.{e}.{name}": size for e in range(self.num_experts) for name, size in of_one.items()}
        return {"gate": (self.num_experts, self.hidden_size), **experts}

    def config(self) -> dict[str, Any]:
        """See ModelShape."""
        return {
            **ModelShape.config(self),
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.intermediate_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }


SHAPES = {
    "bench-moe-850m": MixtureShape(49_152, 1_024, 512, 16, 16, 4, 64),
    "bench-moe-20m": MixtureShape(32_000, 256, 128, 4, 4, 2, 64, num_experts=16, top_k=4),
}


def _head_norms(path: Path, shape: MixtureShape) -> None:
    """Add the norms of queries and keys, which other checkpoints of the comparison lack."""
    import torch  # noqa: PLC0415
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    file = path / "model.safetensors"
    norms = {
        f"model.layers.{layer}.self_attn.{name}.weight": torch.ones(shape.head_dim, dtype=torch.bfloat16)
        for layer in range(shape.num_layers)
        for name in ("q_norm", "k_norm")
    }
    save_file(load_file(file) | norms, file, metadata={"format": "pt"})


def made(name: str) -> Path:
    """The folder of the checkpoint, made now if it does not exist."""
    path = checkpoints.folder(name, 0, checkpoints.cache_folder())
    if not (path / "model.safetensors").is_file():
        checkpoints.write(name, SHAPES[name], 0, checkpoints.cache_folder())
        _head_norms(path, SHAPES[name])
    return path
