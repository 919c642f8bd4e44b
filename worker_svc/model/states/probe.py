"""Finds modules with states: those that ask transformers' cache for them; and whether tokens depend on each other otherwise.

By running a few tokens. What states are: `layout`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from svc_common.errors import ConfigError
from worker_svc.model.decoder.module_states import ModuleStates, StateKey
from worker_svc.model.decoder.part import PackedPast, decoder_of
from worker_svc.model.states.layout import StateShape
from worker_svc.model.states.tensors import mapped, tensors_in


@dataclass(frozen=True, slots=True)
class StateModule:
    """A module that has states: `name` of its kind, `layer`, and its `states` of one sequence.

    `continues`: True if it computes several tokens that follow a state as it does one by one.
    """

    module: nn.Module
    layer: int
    states: tuple[StateShape, ...]
    continues: bool

    @property
    def name(self) -> str:
        """Class of the module."""
        return type(self.module).__name__

    @property
    def num_bytes(self) -> int:
        """Of the states of one sequence."""
        return sum(state.num_bytes for state in self.states)


@dataclass(slots=True)
class _Call:
    """What a probe saw of a module's call. `attended`: attention calls within it."""

    given: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    attended: int = 0


class StateProbe(ModuleStates):
    """Records during a forward pass of `num_tokens` tokens which module asks for which states. Pass it to a `PackedPast`.

    `num_attended` returns the number of attention calls so far.
    """

    def __init__(self, num_tokens: int, num_attended: Callable[[], int]) -> None:
        super().__init__()
        self.called: set[nn.Module] = set()
        """Modules that were called."""
        self._num_tokens, self._num_attended = num_tokens, num_attended
        self._active: list[nn.Module] = []
        self._counts: Counter[nn.Module] = Counter()
        self._calls: dict[nn.Module, _Call] = {}
        self._owners: dict[StateKey, nn.Module] = {}

    def get(self, key: StateKey) -> torch.Tensor | None:
        """See ModuleStates."""
        self._own(key)
        return super().get(key)

    def convolve(self, key: StateKey, columns: torch.Tensor, width: int | None) -> torch.Tensor:
        """See ModuleStates."""
        self._own(key)
        return super().convolve(key, columns, width)

    def replace(self, key: StateKey, state: torch.Tensor) -> torch.Tensor:
        """See ModuleStates."""
        self._own(key)
        return super().replace(key, state)

    def _own(self, key: StateKey) -> None:
        owner = self._owners.setdefault(key, self._active[-1])
        if owner is not self._active[-1]:
            raise _refused(owner, f"shares states of layer {key.layer} with {type(self._active[-1]).__name__}")

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Watch the calls of modules inside the block."""
        modules = [module for module in model.modules() if module is not model]
        before = [module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True) for module in modules]
        after = [module.register_forward_hook(self._leave) for module in modules]
        try:
            yield
        finally:
            for handle in (*before, *after):
                handle.remove()

    def _enter(self, module: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._active.append(module)
        self._counts[module] += 1
        self.called.add(module)
        self._calls[module] = _Call(given, options, self._num_attended())

    def _leave(self, module: nn.Module, _given: tuple[Any, ...], out: object) -> None:
        self._active.pop()
        call = self._calls[module]
        call.attended = self._num_attended() - call.attended
        if module not in self._owners.values():
            call.given, call.options = (), {}
            return
        for x in tensors_in((call.given, call.options, out)):
            if x.shape[:2] != (1, self._num_tokens):
                raise _refused(module, f"takes or returns a tensor {tuple(x.shape)}, which is not of its tokens")

    def modules(self) -> list[StateModule]:
        """The modules with states, in the order in which they ran. Raises ConfigError for one that cannot be served."""
        by_module: dict[nn.Module, list[StateKey]] = {}
        for key, module in self._owners.items():
            by_module.setdefault(module, []).append(key)
        return [self._module(module, keys) for module, keys in by_module.items()]

    def idle_linears(self, found: Iterable[StateModule]) -> list[nn.Module]:
        """Linear modules in state modules that did not compute: these use their weights themselves."""
        inner = (module for each in found for module in each.module.modules())
        return [module for module in inner if isinstance(module, nn.Linear) and module not in self.called]

    def _module(self, module: nn.Module, keys: list[StateKey]) -> StateModule:
        call, layers = self._calls[module], {key.layer for key in keys}
        if call.attended:
            raise _refused(module, "has both states and attention")
        if self._counts[module] > 1 or len(layers) > 1:
            raise _refused(module, "is called several times in a pass")
        lost = [key for key in keys if key not in self.values]
        if lost:
            raise _refused(module, f"asks for a {lost[0].kind} state that it does not set")
        values = {key: self.values[key] for key in keys}
        shapes = tuple(StateShape(key, tuple(value.shape[1:]), value.dtype) for key, value in values.items())
        return StateModule(module, layers.pop(), shapes, self._continues(module, call, values))

    def _continues(self, module: nn.Module, call: _Call, values: dict[StateKey, torch.Tensor]) -> bool:
        """True if several tokens after a state depend on each state: Mamba's scan, for one, begins with zeros."""
        if next(iter(values.values())).is_meta:
            return True
        zeros = {key: torch.zeros_like(value) for key, value in values.items()}

        def computed(states: dict[StateKey, torch.Tensor]) -> list[torch.Tensor]:
            before, self.values, self._active = self.values, {k: value.clone() for k, value in states.items()}, [module]
            try:
                return [x.clone() for x in tensors_in(module.forward(*call.given, **call.options))]
            finally:
                self.values, self._active = before, []

        plain, made = computed(zeros), torch.Generator().manual_seed(0)
        for key, value in values.items():
            other = torch.randn(value.shape, generator=made).to(value)
            if all(map(torch.equal, computed({**zeros, key: other}), plain)):
                return False
        return True


def _refused(module: nn.Module, what: str) -> ConfigError:
    name = type(module).__name__
    return ConfigError(
        f"its module {name} {what}: it cannot be served", reason="MODEL_UNSUPPORTED", metadata={"module": name}
    )


# --- whether tokens depend on each other otherwise ---------------------------------------------------------------------

_TOKENS = ((0, 1, 2, 3), (3, 1, 0, 2))
_PLACE = 1
_TOLERANCES = {torch.float32: 1e-4}
_TOLERANCE = 3e-2  # sums of experts may be rounded otherwise beside other tokens


@torch.inference_mode()
def mixes_tokens(model: PreTrainedModel, state_modules: Sequence[nn.Module]) -> bool:
    """True if a token's hidden state depends on others where `state_modules`, and attention inside a probe, return zeros."""
    hooks = [module.register_forward_hook(_zeros) for module in state_modules]
    try:
        first, other = (_hidden(model, tokens) for tokens in _TOKENS)
    finally:
        for hook in hooks:
            hook.remove()
    return not float((first - other).norm() / first.norm()) <= _TOLERANCES.get(model.dtype, _TOLERANCE)


def _zeros(_module: nn.Module, _given: object, out: object) -> object:
    return mapped(out, torch.zeros_like)


def _hidden(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Last hidden state of one token, [H]."""
    ids = torch.tensor([list(tokens)], device=model.device)
    places = torch.arange(len(tokens), device=model.device)[None]
    past = PackedPast(model.config)
    out = decoder_of(model)(input_ids=ids, position_ids=places, use_cache=False, past_key_values=past)
    found: torch.Tensor = out.last_hidden_state[0, _PLACE].float()
    return found
