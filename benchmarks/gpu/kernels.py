"""Each Triton kernel and attention library alone, at the shapes of large models, as a share of what the device can do.

A figure is the time of one layer: each run goes through enough layers to exceed the caches, as a model's step
does. Work done once per step for all layers (the plan) is a figure of its own.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.clock import Bench
from benchmarks.gpu.peers import flash_attention_of_vllm
from paged_kernels.backend import AttentionBatch, AttentionRule, CacheShape, Pairs
from paged_kernels.gpu import row_kernels, token_draws
from paged_kernels.gpu.backend import TritonBackend, make
from paged_kernels.gpu.library_backend import LibraryBackend
from paged_kernels.program import Norm, RotateAndStore, Rows
from paged_kernels.registry import ATTENTION_BACKENDS, make_attention_backend
from svc_common.errors import ConfigError
from worker_svc.device.devices import Device
from worker_svc.model.cache.cache_engine import CacheEngine

_COLD_BYTES = 256 << 20
_DTYPE = torch.bfloat16
# (sequences, context): microseconds of FA3 on an H200-class device, 32 heads, 8 kv heads of 128, bfloat16.
_FA3_US = {
    (1, 1024): 11.0, (1, 4096): 14.5, (1, 16384): 27.2, (1, 32768): 43.5, (8, 1024): 17.5, (8, 4096): 41.6,
    (8, 16384): 132.7, (8, 32768): 253.5, (16, 1024): 27.1, (16, 4096): 70.4, (32, 1024): None, (32, 4096): None,
    (128, 1024): None, (128, 4096): None,
}  # fmt: skip
_FA3_PREFILL_TFLOPS = {512: 122, 2048: 474, 8192: 679}
_DECODE_GOALS = {(32, 4096): 0.90}


class _Rows:
    """Sampling parameters of n equal rows."""

    def __init__(self, count: int, device: torch.device, temperature: float, top_k: int, top_p: float) -> None:
        whole = torch.arange(count, device=device)
        self.temperatures = torch.full((count,), temperature, device=device)
        self.top_ks, self.top_ps = torch.full_like(whole, top_k), torch.full((count,), top_p, device=device)
        self.seeds, self.sequence_indexes, self.positions = whole, whole * 0, whole + 7
        self.min_ps = None


def _title(what: str, backend: TritonBackend) -> str:
    """Name of a row: Triton's have none of their own."""
    return f"{what}, {backend.name}" if isinstance(backend, LibraryBackend) else what


def installed_libraries(skipped: list[str]) -> Iterator[LibraryBackend]:
    """Attention backends of this repository that this machine has; adds to `skipped` why it has not the others."""
    for name in ATTENTION_BACKENDS:
        try:
            made = make_attention_backend(name, os.environ, print)
        except ConfigError as error:
            skipped.append(error.message)
        else:
            assert isinstance(made, LibraryBackend)
            yield made


class Kernels:
    """All kernels of the Triton backend, and attention of `libraries`; `group` query heads per kv head of `shape`."""

    def __init__(self, bench: Bench, device: Device, libraries: Iterable[LibraryBackend] = ()) -> None:
        self._bench, self._device, self._worker_device = bench, bench.device, device
        self._backend = make()
        self._shape = CacheShape(16, 2, 32) if bench.tiny else CacheShape(16, 8, 128)
        self._group = 2 if bench.tiny else 4
        self._rule = AttentionRule(self._shape.head_dim**-0.5)
        self._attends: list[TritonBackend] = [self._backend, *filter(self._takes, libraries)]

    def run(self) -> None:
        """Run all kernel benchmarks."""
        tiny = self._bench.tiny
        for sequences, context in [(1, 80), (3, 20)] if tiny else _FA3_US:
            for backend in self._attends:
                self._decode(sequences, context, backend)
        for tokens in [40] if tiny else _FA3_PREFILL_TFLOPS:
            for backend in self._attends:
                self._prefill(tokens, backend)
            self._prefill_by_torch(tokens)
        self._peer_attention()
        self._write(50 if tiny else 8192)
        for tokens in [20] if tiny else [128, 8192]:
            self._rows(tokens)
        self._moves(4 if tiny else 256)
        for rows in [2] if tiny else [1, 128]:
            self._sampling(rows, 300 if tiny else 131_072)

    # --- attention ---------------------------------------------------------------------------------------------------

    def _decode(self, sequences: int, context: int, backend: TritonBackend) -> None:
        shape, steps = self._shape, [(context, 1)] * sequences
        if not self._measures(backend, steps):
            return
        num_bytes = sequences * context * 2 * shape.num_kv_heads * shape.head_dim * 2
        layers = 1 if self._bench.tiny else max(1, min(32, _COLD_BYTES // num_bytes))
        name, fa3 = f"b{sequences} x {context}", _FA3_US.get((sequences, context))
        self._bench.add(
            _title("decode attention", backend), name, lambda: self._attention(steps, layers, backend), work=num_bytes,
            ceiling="memory", calls=layers, anchor=f"FA3 {fa3} us" if fa3 else "",
            goal=_DECODE_GOALS.get((sequences, context)) if backend is self._backend else None,
        )  # fmt: skip
        if backend is self._backend and (sequences, context) in {(32, 4096), (3, 20)}:
            batch = self._batch(steps)
            self._bench.add(
                "plan of a step", name, lambda: lambda: self._plan(batch), graph=False, work=num_bytes, ceiling="memory"
            )

    def _takes(self, backend: LibraryBackend) -> bool:
        """True if it takes these shapes; else says why not."""
        problem = backend.limits.problem(self._shape, _DTYPE, _DTYPE, [self._rule])
        if problem:
            self._bench.skipped.append(f"{backend.name} {problem}")
        return not problem

    def _measures(self, backend: TritonBackend, sequences: Sequence[tuple[int, int]]) -> bool:
        """True unless the backend leaves such steps to Triton."""
        return not isinstance(backend, LibraryBackend) or backend.takes(self._batch(sequences))

    def _plan(self, batch: AttentionBatch) -> None:
        batch.plans.clear()
        query = torch.empty(0, self._group * self._shape.num_kv_heads, 1, dtype=_DTYPE)
        self._backend.plans(query, batch, self._shape, self._rule)

    def _operations(self, tokens: int) -> float:
        """Of causal attention, half of the square."""
        return 4 * self._group * self._shape.num_kv_heads * self._shape.head_dim * tokens * (tokens + 1) / 2

    def _prefill(self, tokens: int, backend: TritonBackend) -> None:
        published = _FA3_PREFILL_TFLOPS.get(tokens)
        self._bench.add(
            _title("prefill attention", backend), f"{tokens} tokens",
            lambda: self._attention([(tokens, tokens)], 1, backend), work=self._operations(tokens), ceiling="gemm",
            anchor=f"FA3 {published} TFLOP/s" if published else "",
        )  # fmt: skip

    def _prefill_by_torch(self, tokens: int) -> None:
        if torch.cuda.is_available():
            for kind in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
                self._bench.add(
                    f"torch {kind.name.lower()}", f"{tokens} tokens", lambda kind=kind: self._torch(tokens, kind),
                    graph=False, work=self._operations(tokens), ceiling="gemm",
                )  # fmt: skip

    def _peer_attention(self) -> None:
        """FlashAttention-3 as vLLM's wheel has it, where it was carried here; its pages have tokens before heads."""
        attend = flash_attention_of_vllm(self._bench.skipped)
        if attend is None:
            return
        shape, group = self._shape, self._group
        for sequences, context, new in ((1, 4096, 1), (32, 1024, 1), (32, 4096, 1), (1, 8192, 8192)):
            steps = [(context, new)] * sequences
            layers = 1 if new > 1 else 4
            what = {"work": self._operations(new), "ceiling": "gemm"} if new > 1 else {
                "work": sequences * context * 4 * shape.num_kv_heads * shape.head_dim, "ceiling": "memory"
            }  # fmt: skip
            name, label = ("prefill", f"{new} tokens") if new > 1 else ("decode", f"b{sequences} x {context}")
            self._bench.add(
                f"{name} attention, vllm's FA3", label,
                lambda steps=steps, layers=layers: attend(self._batch(steps), shape, group, layers, self._random), calls=layers,
                **what,
            )  # fmt: skip

    def _torch(self, tokens: int, kind: SDPBackend) -> Callable[[], Any]:
        heads, dim = self._group * self._shape.num_kv_heads, self._shape.head_dim
        query, key, value = (self._random(1, heads, tokens, dim) for _ in range(3))

        def run() -> torch.Tensor:
            with sdpa_kernel(kind):
                return scaled_dot_product_attention(query, key, value, is_causal=True)

        return run

    def _attention(
        self, sequences: Sequence[tuple[int, int]], layers: int, backend: TritonBackend
    ) -> Callable[[], None]:
        """A step with sequences of (context, new tokens), over this many layers."""
        batch = self._batch(sequences)
        blocks = int(batch.block_tables.max()) + 1
        pool = self._random(layers, 2, blocks, self._shape.block_elements(_DTYPE))
        tokens = sum(new for _, new in sequences)
        query = self._random(tokens, self._group * self._shape.num_kv_heads, self._shape.head_dim)

        def run() -> None:
            for cache in pool:
                backend.paged_attention(query, cache, batch, self._shape, self._rule)

        return run

    def _batch(self, sequences: Sequence[tuple[int, int]]) -> AttentionBatch:
        """A batch with blocks in random order, as after some time of serving."""
        size, count = self._shape.block_size, len(sequences)
        width = max(-(-context // size) for context, _ in sequences)
        tables = torch.randperm(count * width).view(count, width)
        rows = torch.arange(count).repeat_interleave(torch.tensor([new for _, new in sequences]))
        positions = torch.cat([torch.arange(context - new, context) for context, new in sequences])
        slots = tables[rows, positions // size] * size + positions % size
        offsets = np.cumsum([0, *(new for _, new in sequences)], dtype=np.int32)
        columns = (rows.int(), positions.int(), slots, tables.int())
        lengths = np.array([context for context, _ in sequences], np.int32)
        return AttentionBatch(*(column.to(self._device) for column in columns), offsets, lengths)

    # --- memory ------------------------------------------------------------------------------------------------------

    def _write(self, tokens: int) -> None:
        shape = self._shape
        blocks = -(-tokens // shape.block_size)
        layers = 1 if self._bench.tiny else 8

        def make() -> Callable[[], None]:
            merged = self._random(tokens, 2, shape.num_kv_heads, shape.head_dim)
            slots = torch.randperm(blocks * shape.block_size, device=self._device)[:tokens]
            pool = self._random(layers, 2, blocks, shape.block_elements(_DTYPE))
            return lambda: (
                [self._backend.write_kv(merged[:, 0], merged[:, 1], cache, slots, shape) for cache in pool] and None
            )

        moved = 2 * 2 * tokens * shape.num_kv_heads * shape.head_dim * 2
        self._bench.add("cache write", f"{tokens} tokens", make, work=moved, ceiling="memory", calls=layers, goal=0.90)

    def _moves(self, count: int) -> None:
        """Move blocks of 32 layers by the worker's cache engine: 2 MiB each at the shape of an 8 B model."""
        shape, layers = self._shape, 1 if self._bench.tiny else 32
        num_bytes = count * layers * 2 * shape.block_elements(_DTYPE) * _DTYPE.itemsize
        cache = CacheEngine(
            shape, num_layers=layers, num_gpu_blocks=2 * count, num_cpu_blocks=count, dtype=_DTYPE, device=self._worker_device,
            blocks=self._backend.blocks,
        )  # fmt: skip
        apart = [(i, count + (i * 7 + 3) % count) for i in range(count)]
        # One run of host blocks, as after a first swap, and blocks that lie apart.
        together, scattered = [(i, i) for i in range(count)], [(i, (i * 7 + 3) % count) for i in range(count)]
        back = [(host, block) for block, host in together]

        def swap_out(pairs: Pairs) -> None:
            cache.swap_out(pairs)
            cache.host_pool  # noqa: B018 (waits for the copies)

        for name, run, ceiling, traffic in (
            ("block copy", lambda: cache.copy(apart), "memory", 2),
            ("swap out", lambda: swap_out(together), "to host", 1),
            ("swap out, scattered", lambda: swap_out(scattered), "to host", 1),
            ("swap in", lambda: cache.swap_in(back), "to device", 1),
        ):
            self._bench.add(
                name, f"{count} blocks", lambda run=run: run, graph=False, work=traffic * num_bytes, ceiling=ceiling, goal=0.95,
            )  # fmt: skip

    def _rows(self, tokens: int) -> None:
        """What a decoder computes between its products and attention, at the widths of an 8 B model."""
        shape, tiny = self._shape, self._bench.tiny
        width, gated_width = (64, 128) if tiny else (4096, 14336)
        heads = self._group * shape.num_kv_heads
        stream, weight = self._random(tokens, width), self._random(width)
        both, packed = (
            self._random(tokens, 2 * gated_width),
            self._random(tokens, (heads + 2 * shape.num_kv_heads) * shape.head_dim),
        )
        angles, batch = self._random(tokens, shape.head_dim), self._batch([(tokens, tokens)])
        cache = self._random(2, int(batch.block_tables.max()) + 1, shape.block_elements(_DTYPE))
        add, turn = Norm(Rows.STREAM, Rows.STREAM, weight, 1e-5, adds=True), RotateAndStore(0, angles, angles, None)
        for name, run, elements in (
            ("add and norm", lambda: row_kernels.norm(add, stream, stream), 3 * stream.numel()),
            ("gate", lambda: row_kernels.gated(both, "silu"), 1.5 * both.numel()),
            (
                "rotate and store",
                lambda: row_kernels.rotate_and_store(turn, packed, heads, cache, batch, shape),
                2 * packed.numel(),
            ),
        ):
            work = _DTYPE.itemsize * elements
            self._bench.add(name, f"{tokens} tokens", lambda run=run: run, work=work, ceiling="memory", goal=0.90)

    def _sampling(self, rows: int, vocab: int) -> None:
        logits = torch.randn(rows, vocab, device=self._device) * 3
        fit = torch.ones(rows, dtype=torch.bool, device=self._device)
        for name, parameters, anchor in (
            ("greedy", (0.0, 0, 1.0), ""),
            ("temperature", (0.8, 0, 1.0), ""),
            ("top-k and top-p", (0.8, 50, 0.9), "FlashInfer 267 us at b128"),
        ):
            given = _Rows(rows, self._device, *parameters)
            self._bench.add(
                f"sampling, {name}", f"b{rows}, V {vocab}", lambda given=given: lambda: token_draws.draw(logits, given, fit),
                work=4 * rows * vocab, ceiling="memory", anchor=anchor,
            )  # fmt: skip

    def _random(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=self._device, dtype=_DTYPE)
