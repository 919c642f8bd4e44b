"""The experts of one rank: whole experts are divided over the ranks of a group, the router is on all of them.

Each rank routes every token and computes those of its own experts; the others' add nothing to its part of the sum.
A rank with no routed token takes part in the sum with zeros. Expert modules that state the ability to skip experts
(`transformers`' `use_experts_implementation`) are divided, whichever model has them.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from worker_svc.model.sharding.refusals import refused

_SKIPS_EXPERTS = "_is_expert_parallel"


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """Experts `first` to `first + count - 1` of every module with a name that `modules` matches; `weights`: its parameters.

    `stored` matches a checkpoint's tensors of one expert each, with the expert's number as group 1.
    """

    modules: re.Pattern[str]
    weights: tuple[str, ...]
    stored: re.Pattern[str]
    first: int
    count: int

    def is_elsewhere(self, name: str) -> bool:
        """True if a checkpoint's tensor of this name is of one expert, which another rank has."""
        found = self.stored.search(name)
        return found is not None and not self.first <= int(found[1]) < self.first + self.count

    def class_of(self, cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
        """`cls` with the rank's experts alone. Its instances raise ConfigError if their modules cannot skip experts."""

        def initialize(model: PreTrainedModel, config: Any, *arguments: Any, **options: Any) -> None:
            cls.__init__(model, config, *arguments, **options)
            self._divide(model)

        return type(cls.__name__, (cls,), {"__init__": initialize, "__module__": cls.__module__})

    def _divide(self, model: PreTrainedModel) -> None:
        for name, module in model.named_modules():
            if not self.modules.search(name):
                continue
            if not hasattr(module, _SKIPS_EXPERTS):
                raise refused(
                    f"{type(model).__name__} has {name}, which cannot skip experts of other ranks", module=name
                )
            for leaf in self.weights:
                whole = module.get_parameter(leaf)
                part = whole.new_empty(self.count, *whole.shape[1:])
                module.register_parameter(leaf, nn.Parameter(part, requires_grad=whole.requires_grad))
            module.num_experts = self.count
            setattr(module, _SKIPS_EXPERTS, True)
            module.register_forward_pre_hook(self._route)

    def _route(
        self, _module: nn.Module, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Number the experts [tokens, k] from this rank's first; `count` means another rank's, with weight 0."""
        hidden, experts, weights = given
        own = experts - self.first
        is_elsewhere = (own < 0) | (own >= self.count)
        return hidden, own.masked_fill(is_elsewhere, self.count), weights.masked_fill(is_elsewhere, 0)
