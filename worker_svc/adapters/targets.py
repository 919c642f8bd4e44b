"""Modules of a model that adapters may change, and the check of an adapter's folder against them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from svc_common.errors import InvalidArgument
from worker_svc.adapters.config import refused
from worker_svc.adapters.files import AdapterFolder, PairShapes
from worker_svc.model.fused.packed_linear import PackedLinear


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A linear module that adapters may change.

    It sees every packed token once and in order; if `of_logits`, the tokens that need logits.
    """

    module: nn.Module
    num_in: int
    num_out: int
    of_logits: bool
    dtype: torch.dtype
    device: torch.device


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a linear module; None for any other."""
    if isinstance(module, nn.Linear | PackedLinear):
        return module.in_features, module.out_features
    if isinstance(module, Conv1D):
        return int(module.weight.shape[0]), int(module.weight.shape[1])
    return None


@dataclass(slots=True)
class Targets:
    """Target modules by name, found by `probed`. `kinds`: class of every module, for messages."""

    _model: PreTrainedModel
    by_name: dict[str, AdaptedLinear] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def probed(self, num_tokens: int) -> Iterator[None]:
        """Find targets during a forward pass inside the block: linear modules that see all tokens each time they are called.

        The pass must have `num_tokens` tokens and compute the logits of all.
        """
        counts: dict[nn.Module, list[int]] = {}
        linear = [module for module in self._model.modules() if _sizes(module)]

        def see(module: nn.Module, given: tuple[torch.Tensor, ...], _out: object) -> None:
            counts.setdefault(module, []).append(given[0].shape[:-1].numel())

        handles = [module.register_forward_hook(see) for module in linear]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._take({module for module, seen in counts.items() if set(seen) == {num_tokens}})

    def _take(self, reached: set[nn.Module]) -> None:
        head: nn.Module | None = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
        for name, module in self._model.named_modules():
            self.kinds[name] = type(module).__name__
            sizes = _sizes(module)
            if sizes is not None and module in reached:
                self.by_name[name] = AdaptedLinear(
                    module, *sizes, module is head, self._model.dtype, self._model.device
                )

    def check(self, folder: AdapterFolder, max_rank: int) -> None:
        """Raise InvalidArgument, naming module and shapes, if the adapter is for another base or its rank is too high."""
        for name, shapes in folder.pairs.items():
            self._check_module(folder, name)
            _check_shapes(folder, name, shapes, self.by_name[name])
            rank = shapes.down[0]
            if rank > max_rank:
                raise refused(
                    "ADAPTER_RANK",
                    f"{name} has rank {rank}; this worker's limit is {max_rank} (--max-adapter-rank)",
                    limit=str(max_rank),
                )
        missing = [name for name in self._expected(folder) if name not in folder.pairs]
        if missing:
            what = f"is targeted by adapter_config.json, but the adapter has no weights for it ({len(missing)} such modules)"
            raise _mismatch(folder, missing[0], what)

    def _check_module(self, folder: AdapterFolder, name: str) -> None:
        if name not in self.kinds:
            raise _mismatch(folder, name, "does not exist in this model")
        if name not in self.by_name:
            raise _mismatch(
                folder, name, f"is a {self.kinds[name]} here; adapters change linear modules that see all tokens"
            )
        if not folder.config.may_change(name):
            raise refused(
                "ADAPTER_INVALID",
                f"there are weights for {name}, which target_modules in adapter_config.json does not include",
            )

    def _expected(self, folder: AdapterFolder) -> list[str]:
        """Modules that the configuration targets; none if it sets no targets."""
        config = folder.config
        if config.targets is None:
            return []
        return [
            name
            for name, target in self.by_name.items()
            if config.may_change(name) and not (config.is_all_linear and target.of_logits)
        ]


def _check_shapes(folder: AdapterFolder, name: str, shapes: PairShapes, target: AdaptedLinear) -> None:
    rank = folder.config.rank_of(name)
    wanted = PairShapes((rank, target.num_in), (target.num_out, rank))
    if shapes != wanted:
        raise _mismatch(
            folder,
            name,
            f"needs lora_A of {_text(wanted.down)} and lora_B of {_text(wanted.up)} here (rank {rank} by adapter_config.json); "
            f"the adapter has {_text(shapes.down)} and {_text(shapes.up)}",
        )


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape)


def _mismatch(folder: AdapterFolder, module: str, what: str) -> InvalidArgument:
    base = f" (trained on {folder.base!r}, it says)" if folder.base else ""
    return refused(
        "ADAPTER_MISMATCH", f"the adapter is not for this model{base}: module {module} {what}", module=module
    )
