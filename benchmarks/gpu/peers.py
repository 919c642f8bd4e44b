"""Peers on the same device, in the same run: transformers' continuous batching, and FlashAttention-3 as vLLM's wheel has it."""

import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.gpu.clock import Bench
from paged_kernels.backend import AttentionBatch, CacheShape

FLASH_ATTENTION = "vllm.vllm_flash_attn.flash_attn_interface"
Attend = Callable[..., Callable[[], None]]


def flash_attention_of_vllm(skipped: list[str]) -> Attend | None:
    """What prepares its attention of a batch; None if it is not there, and `skipped` says so."""
    try:
        function = importlib.import_module(FLASH_ATTENTION).flash_attn_varlen_func
    except (ImportError, OSError, AttributeError) as error:
        skipped.append(f"vllm's FA3: {error}")
        return None

    def prepare(
        batch: AttentionBatch, shape: CacheShape, group: int, layers: int, random: Callable[..., torch.Tensor]
    ) -> Callable[[], None]:
        device, offsets = batch.slots.device, batch.offsets
        counts = offsets[1:] - offsets[:-1]
        assert batch.lengths is not None
        sizes = (layers, 2, int(batch.block_tables.max()) + 1, shape.block_size, shape.num_kv_heads, shape.head_dim)
        query, pools = random(len(batch.slots), group * shape.num_kv_heads, shape.head_dim), random(*sizes)
        given: dict[str, Any] = {
            "cu_seqlens_q": torch.from_numpy(offsets).to(device),
            "seqused_k": torch.from_numpy(batch.lengths).to(device),
            "max_seqlen_q": int(counts.max()),
            "max_seqlen_k": int(batch.lengths.max()),
            "block_table": batch.block_tables,
            "causal": True,
            "fa_version": 3,
        }

        def run() -> None:
            for keys, values in pools:
                function(query, keys, values, **given)

        return run

    return prepare


def transformers_batching(
    bench: Bench, folder: Path, prompts: Sequence[Sequence[int]], num_tokens: int, work: float, label: str
) -> None:
    """E11: seconds of transformers' continuous batching, greedy, as it is installed. `work`: see Figure."""

    def seconds() -> float:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
        model = model.to("cpu" if bench.tiny else bench.device).eval()
        config = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        given = [list(prompt) for prompt in prompts]
        model.generate_batch(inputs=given[:2], generation_config=config)  # compiles what it compiles
        begin = time.perf_counter()
        outputs = model.generate_batch(inputs=given, generation_config=config)
        found = time.perf_counter() - begin
        made = sum(len(output.generated_tokens) for output in outputs.values())
        if made != len(given) * num_tokens:
            raise RuntimeError(f"{made} tokens of {len(given) * num_tokens}")
        return found

    bench.measure("transformers' continuous batching", label, seconds, work=work, ceiling="floor")
