"""Joins what the modules of all ranks compute, by hooks: parts of a sum are added, parts of the logits gathered."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from paged_kernels.program import Gather, Head, PackedWeights
from paged_kernels.ranks import RankSums
from worker_svc.model.sharding.shards import Shard, summed_modules

_LANES = 16


class Reductions:
    """Owner of the hooks on `model`. What replaces a module must keep its hooks (`packed_linear.put_in_place`)."""

    def __init__(self, model: nn.Module, shard: Shard, sums: RankSums) -> None:
        self.sums, self.shard = sums, shard
        self._is_paused = False
        self.has_part_of_head = False
        for module in summed_modules(model, shard):
            module.register_forward_hook(self._reduce)

    def _reduce(self, _module: nn.Module, _given: object, out: torch.Tensor) -> None:
        if not self._is_paused:
            self.sums.all_reduce(out)

    def divide_head(self, model: PreTrainedModel) -> None:
        """Let each rank compute its part of the logits, where the head is a plain linear module that divides.

        Replaces the head; `shard` has its part from now on.
        """
        size, rank = self.shard.size, self.shard.rank
        head: nn.Module | None = model.get_output_embeddings()
        if type(head) is not nn.Linear or head.out_features % (size * _LANES):
            return
        columns = head.out_features // size
        begin = rank * columns
        weight = head.weight[begin : begin + columns]
        is_tied = head.weight is getattr(model.get_input_embeddings(), "weight", None)
        part = nn.Linear(head.in_features, columns, bias=head.bias is not None, device="meta")
        part.weight = nn.Parameter(weight if is_tied else weight.clone(), requires_grad=False)
        if head.bias is not None:
            part.bias = nn.Parameter(head.bias[begin : begin + columns].clone(), requires_grad=False)
        name = next(name for name, module in model.named_modules() if module is head)
        model.set_submodule(name, part)
        part.register_forward_hook(self._gather)
        self.shard, self.has_part_of_head = self.shard.with_columns(name), True

    def head_of(self, weights: PackedWeights) -> tuple[Head, *tuple[Gather, ...]]:
        """The operators of the head of a program; see `HeadOf`."""
        if not self.has_part_of_head:
            return (Head(weights),)
        columns, shard = weights.columns, self.shard
        return Head(weights, shard.rank * columns, shard.size * columns), Gather(columns, self.sums)

    def _gather(self, _module: nn.Module, _given: object, out: torch.Tensor) -> torch.Tensor | None:
        return None if self._is_paused else self.sums.all_gather(out)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block, modules return this rank's part: for calls that other ranks do not make."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
