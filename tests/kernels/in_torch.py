"""The operators of a program in plain torch, one tensor after the other, rounded as modules of transformers round."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from paged_kernels.backend import AttentionBatch, KernelBackend
from paged_kernels.decoder import DecoderKernels
from paged_kernels.program import Attend, Gated, Linear, Norm, Operator, RotateAndStore, Rows
from tests.kernels.programs import Cache

ACTIVATIONS = {"silu": functional.silu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh")}
EPS = 1e-5
HEADS, ATTENDED = Rows.HEADS, Rows.ATTENDED
Angles = tuple[torch.Tensor | None, torch.Tensor | None]


def normed(x: torch.Tensor, weight: torch.Tensor, *, one_plus: bool) -> torch.Tensor:
    """As the modules of Llama and of Gemma round."""
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    return (wide * (1 + weight.float())).to(x.dtype) if one_plus else weight * wide.to(x.dtype)


def turned(heads: torch.Tensor, positions: torch.Tensor, angles: Angles | None) -> torch.Tensor:
    """[T, H, D] by transformers' half rotation of the first elements, rounded after each operation."""
    if angles is None or angles[0] is None or angles[1] is None:
        return heads
    cosines, sines = (x[positions.long()][:, None] for x in angles)
    width = cosines.shape[-1]
    part, rest = heads[..., :width], heads[..., width:]
    left, right = part.chunk(2, -1)
    return torch.cat([part * cosines + torch.cat([-right, left], -1) * sines, rest], -1)


def in_torch(
    kernels: DecoderKernels,
    backend: KernelBackend,
    operators: Sequence[Operator],
    stream: torch.Tensor,
    heads: int,
    cache: Cache,
    batch: AttentionBatch,
) -> torch.Tensor:
    """What becomes of `stream`, over the attention of `backend` and the products of `kernels`."""
    rows = {Rows.STREAM: stream.clone()}
    dim, kv_heads = cache.shape.head_dim, cache.shape.num_kv_heads
    for op in operators:
        if isinstance(op, Norm):
            made = normed(rows[op.source], op.weight, one_plus=op.one_plus)
            rows[op.target] = rows[op.target] + made if op.adds else made
        elif isinstance(op, Linear):
            made = kernels.linear(rows[op.source], op.weights)
            rows[op.target] = rows[op.target] + made if op.adds else made
        elif isinstance(op, Gated):
            gates, ups = (kernels.linear(rows[op.source], w) for w in (op.gate, op.up))
            rows[op.target] = ACTIVATIONS[op.activation](gates) * ups
        elif isinstance(op, RotateAndStore):
            given = rows[HEADS].view(len(stream), -1, dim)
            parts = [given[:, :heads], given[:, heads : heads + kv_heads]]
            if op.norm is not None:
                weights = (op.norm.queries, op.norm.keys)
                parts = [normed(x, w, one_plus=op.norm.one_plus) for x, w in zip(parts, weights, strict=True)]
            moved = [turned(part, batch.positions, (op.cosines, op.sines)) for part in parts]
            rows[HEADS] = torch.cat([*moved, given[:, heads + kv_heads :]], 1)
            keys, values = rows[HEADS][:, heads : heads + kv_heads], rows[HEADS][:, heads + kv_heads :]
            backend.write_kv(keys, values, cache.pool[op.layer], batch.slots, cache.shape)
        elif isinstance(op, Attend):
            queries = rows[HEADS][:, :heads].contiguous()
            out = backend.paged_attention(queries, cache.pool[op.layer], batch, cache.shape, op.rule)
            rows[ATTENDED] = out.view(len(stream), -1)
    return rows[Rows.STREAM]
