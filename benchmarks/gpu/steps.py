"""Decode steps of whole models with random weights, by the worker's own code.

Each is run module by module, as a program of launches, and recorded as one launch. The floor of a step is the time to read its
weights and cache, or to compute its products, whichever is longer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from benchmarks.gpu.clock import Bench
from paged_kernels.backend import CacheShape
from paged_kernels.gpu.backend import TritonBackend, sharing_of
from worker_svc.device.devices import HOST, CudaDevice, Device
from worker_svc.invariance import FREE
from worker_svc.model import attention
from worker_svc.model.dummy_batch import Chunk, pack
from worker_svc.model.fused.equivalence_check import fuse_tried
from worker_svc.model.fused.fused_decoder import Fusing
from worker_svc.model.input_batch import model_inputs
from worker_svc.model.row_model import RowModel

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
    """Run all models, one after the other: module by module, as a program, and with the program's steps recorded."""
    for model in models(tiny=bench.tiny):
        worker = _Worker(model.config, bench, max(context for _, context in model.batches))
        _steps(bench, model, worker, "decode step, modules", records=False)
        worker.fuse()
        _steps(bench, model, worker, "decode step, program", records=False)
        _steps(bench, model, worker, "decode step, recorded", records=True)
        del worker


def _steps(bench: Bench, model: Model, worker: "_Worker", name: str, *, records: bool) -> None:
    config = model.config
    for sequences, context in model.batches:
        kv_bytes = sequences * context * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 2
        floor_s = bench.floor_s(worker.weight_bytes, worker.weight_bytes * sequences) + bench.floor_s(kv_bytes, 0)
        try:
            bench.add(
                name, f"{model.name} b{sequences} x {context}", partial(worker.step, sequences, context, records=records),
                graph=False, work=floor_s, ceiling="floor", goal=0.82 if records else None,
            )  # fmt: skip
        except RuntimeError as error:
            bench.skipped.append(f"{name} {model.name} b{sequences}: {str(error).splitlines()[0][:100]}")


def _make(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    config._attn_implementation = attention.register()
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


class _Worker:
    """A model as the worker runs it: module by module at first, then as a program with recorded decode steps."""

    def __init__(self, config: PreTrainedConfig, bench: Bench, most_context: int) -> None:
        self._config, self._device, self._most = config, bench.device, most_context
        self._backend = TritonBackend(sharing_of(bench.device))
        self._recorder: Device = CudaDevice(0) if bench.device.type == "cuda" else HOST
        made = _make(config, bench.device)
        self.weight_bytes = sum(p.nbytes for p in made.parameters())
        if not config.tie_word_embeddings:
            self.weight_bytes -= made.get_input_embeddings().weight.nbytes
        self._model = RowModel(made, self._backend)
        self._calls = self._model.probe(most_context)
        self._shape = CacheShape(_BLOCK_SIZE, config.num_key_value_heads, config.head_dim)

    def fuse(self) -> None:
        """Make the program; its weights are merged."""
        given = Fusing(self._backend.decoder, self._calls, self._shape, torch.bfloat16, self._most)
        fuse_tried(self._model, given, self._config.vocab_size)

    def step(self, sequences: int, context: int, *, records: bool = False) -> Callable[[], torch.Tensor]:
        """Decode one token of each sequence and choose the most likely next one."""
        width = -(-context // _BLOCK_SIZE)
        tables = np.random.default_rng(0).permutation(sequences * width).reshape(sequences, width).astype(np.int32)
        chunks = [Chunk(row, context - 1, [7], samples=True) for row in range(sequences)]
        [given] = model_inputs(pack(chunks, tables, _BLOCK_SIZE), torch.from_numpy(tables), FREE)
        given = given.to(self._device)
        sizes = (self._config.num_hidden_layers, 2, sequences * width, self._shape.block_elements(torch.bfloat16))
        self._model.bind(self._shape, torch.zeros(sizes, dtype=torch.bfloat16, device=self._device))
        if records and not self._model.record(self._recorder, sequences, width, given):
            raise RuntimeError("the recorded step is not used: its logits differ")
        return lambda: self._model.logits([given]).argmax(-1)
