"""Decode steps of whole models with random weights: run by Python, and replayed from a CUDA graph.

The models are transformers' own classes with Quire's paged attention, as in the worker. The floor of a step
is the time to read its weights and cache, or to compute its products, whichever is longer.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from benchmarks.gpu.clock import Bench
from paged_kernels.backend import AttentionBatch, CacheShape
from paged_kernels.triton_backend import TritonBackend, sharing_of
from worker_svc.model import attention

_BLOCK_SIZE = 16
_VOCAB = 128_256


@dataclass(frozen=True, slots=True)
class Model:
    """A model shape, and the batches (sequences, context) to decode."""

    name: str
    config: PreTrainedConfig
    batches: tuple[tuple[int, int], ...]


def models(*, tiny: bool) -> list[Model]:
    """The models to decode; goals are shares of the floor."""
    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=300, num_key_value_heads=2, head_dim=16, max_position_embeddings=256, **sizes)
        return [Model("tiny", config, ((2, 20),))]
    llama = LlamaConfig(
        vocab_size=_VOCAB, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    qwen = Qwen3Config(
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    batches = ((1, 1024), (32, 1024), (128, 1024))
    return [Model("Qwen3 0.6B", qwen, batches), Model("Llama 8B", llama, batches)]


def run(bench: Bench) -> None:
    """Run all models, one after the other."""
    for model in models(tiny=bench.tiny):
        made = _make(model.config, bench.device)
        for sequences, context in model.batches:
            _steps(bench, model, made, sequences, context)
        del made


def _make(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    config._attn_implementation = attention.register()
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def _steps(bench: Bench, model: Model, made: PreTrainedModel, sequences: int, context: int) -> None:
    config = model.config
    weight_bytes = sum(p.nbytes for p in made.parameters())
    if not config.tie_word_embeddings:
        weight_bytes -= made.get_input_embeddings().weight.nbytes
    kv_bytes = sequences * context * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 2
    floor_s = bench.floor_s(weight_bytes, weight_bytes * sequences) + bench.floor_s(kv_bytes, 0)
    for name, graph in (("decode step", False), ("decode step, graph", True)):
        try:
            bench.add(
                name, f"{model.name} b{sequences} x {context}", lambda: _decode(made, config, bench.device, sequences, context),
                graph=graph, work=floor_s, ceiling="floor", goal=0.85 if graph else None,
            )  # fmt: skip
        except RuntimeError as error:
            bench.skipped.append(f"{name} {model.name} b{sequences}: {str(error).splitlines()[0][:100]}")


def _decode(
    model: PreTrainedModel, config: PreTrainedConfig, device: torch.device, sequences: int, context: int
) -> Callable[[], torch.Tensor]:
    """Decode one token per sequence; all tensors keep their addresses, so that a graph can replay it."""
    shape = CacheShape(_BLOCK_SIZE, config.num_key_value_heads, config.head_dim)
    width = -(-context // _BLOCK_SIZE)
    tables = torch.randperm(sequences * width).view(sequences, width)
    positions = torch.full((sequences,), context - 1)
    slots = tables[:, (context - 1) // _BLOCK_SIZE] * _BLOCK_SIZE + (context - 1) % _BLOCK_SIZE
    columns = (torch.arange(sequences).int(), positions.int(), slots, tables.int())
    batch = AttentionBatch(*(column.to(device) for column in columns), np.arange(sequences + 1, dtype=np.int32))
    sizes = (config.num_hidden_layers, 2, sequences * width, shape.block_elements(torch.bfloat16))
    pool = torch.zeros(sizes, dtype=torch.bfloat16, device=device)
    no_windows = dict.fromkeys(range(config.num_hidden_layers))
    paged = attention.PagedAttention(TritonBackend(sharing_of(device)), shape, pool, no_windows)
    attention.attach(model, paged)
    paged.begin(batch)
    ids, places = torch.full((1, sequences), 7, device=device), positions.to(device)[None]

    @torch.inference_mode()
    def run() -> torch.Tensor:
        return model(input_ids=ids, position_ids=places, use_cache=False).logits.argmax(-1)

    return run
