"""Applies low-rank adapters to a packed row: each token gets its own adapter, several adapters per pass.

Tokens are grouped by adapter once per pass; each targeted module then gathers an adapter's tokens,
multiplies, and adds the result in place. Modules have hooks only while a pass uses adapters that change them:
a pass without adapters runs none of this.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from svc_common.errors import FailedPrecondition
from worker_svc.adapters.targets import Targets
from worker_svc.invariance import FREE, RowProbe, RowRule, measure

log = logging.getLogger(__name__)

AdapterIds = NDArray[np.int32]

_MEASURE_S = 0.05


@dataclass(frozen=True, slots=True)
class LowRank:
    """A module's change: y += (x @ down.T * scale) @ up.T. `down` [rank, in], `up` [out, rank], in the model's dtype."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter in memory. `changes`: by module name. `rank`: the largest. `num_bytes`: size of its tensors."""

    changes: Mapping[str, LowRank]
    rank: int
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class _Share:
    """Rows of a packed tensor that one adapter changes: `places` (int64), and `gathered`, the same padded by repetition."""

    places: torch.Tensor
    gathered: torch.Tensor


Shares = dict[int, list[_Share]]


def share_out(ids: AdapterIds, rules: Mapping[int, RowRule], device: torch.device) -> Shares:
    """Rows that each adapter of `rules` changes, split and padded by its rule. `ids` [rows]: adapter of each, 0 = none."""
    return {
        adapter_id: [_share(places[begin:end], rule, device) for begin, end in rule.pieces(len(places))]
        for adapter_id, rule in rules.items()
        for places in [np.flatnonzero(ids == adapter_id)]
    }


def _share(places: NDArray[np.int64], rule: RowRule, device: torch.device) -> _Share:
    padded = np.full(rule.padded(len(places)), places[0])
    padded[: len(places)] = places
    gathered = torch.from_numpy(padded).to(device, non_blocking=True)
    return _Share(gathered[: len(places)], gathered)


@dataclass(slots=True)
class ProductRules:
    """Row rules of the adapters' own products, measured once per shape (`invariance.measure`).

    Until `settle` is called there are no restrictions, since nothing is computed yet.
    """

    _max_rows: int = 0
    _strict: bool = False
    _measured: dict[tuple[torch.Size, torch.dtype], RowRule | None] = field(default_factory=dict)

    def settle(self, max_rows: int, *, strict: bool) -> None:
        """Require batch invariance for steps of up to `max_rows` tokens; 0 = not required.

        `strict`: refuse adapters that cannot be batch invariant, rather than serve them without it.
        """
        self._max_rows, self._strict = max_rows, strict
        self._measured.clear()

    def rule_of(self, adapter: LoraAdapter) -> RowRule:
        """The rule under which its products keep a row's bits.

        Raises FailedPrecondition if there is none and `strict` is set.
        """
        rule: RowRule | None = FREE
        for matrix in self._matrices(adapter):
            measured = self._measure(matrix)
            rule = rule.joined(measured) if rule is not None and measured is not None else None
        if rule is None and self._strict:
            raise FailedPrecondition(
                "on this CPU the adapter's results depend on the batch at any padding: start the worker without --invariant",
                reason="NOT_INVARIANT",
            )
        if rule is None:
            log.warning("an adapter's results may depend on the batch: no padding makes it batch invariant")
        return rule or FREE

    def _matrices(self, adapter: LoraAdapter) -> list[torch.Tensor]:
        if not self._max_rows:
            return []
        return [matrix for change in adapter.changes.values() for matrix in (change.down, change.up)]

    def _measure(self, matrix: torch.Tensor) -> RowRule | None:
        key = (matrix.shape, matrix.dtype)
        if key not in self._measured:
            self._measured[key] = measure([_probe(matrix)], self._max_rows, budget_s=_MEASURE_S)
        return self._measured[key]


def _probe(matrix: torch.Tensor) -> RowProbe:
    num_out, num_in = matrix.shape
    module = nn.Linear(num_in, num_out, bias=False, device="meta")
    module.weight = nn.Parameter(matrix, requires_grad=False)
    return RowProbe(module, 2, num_in, matrix.dtype)


class AdapterLayers:
    """Owner of the hooks on a model's modules. Call `begin` before each forward pass, `changed` when adapters change."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.targets = Targets(model)
        self._model = model
        self._adapters: Mapping[int, LoraAdapter] = {}
        self._rules: dict[int, RowRule] = {}
        self._hooked: frozenset[int] = frozenset()
        self.is_used = False
        """True if the last `begin` named adapters."""
        self._changes_logits = False
        self._handles: list[RemovableHandle] = []
        self._ids: AdapterIds = np.zeros(0, np.int32)
        self._tokens: Shares = {}
        self._logits: Shares = {}

    def changed(self, adapters: Mapping[int, LoraAdapter], rules: Mapping[int, RowRule]) -> None:
        """Replace the adapters that passes may use, each with the rule of its products."""
        self._hook(frozenset())
        self._adapters, self._rules = dict(adapters), dict(rules)

    def begin(self, ids: AdapterIds | None, logit_rows: torch.Tensor) -> None:
        """Announce the adapters of the next pass's packed tokens: int32 [T], 0 = none; None if no token has one.

        `logit_rows`: int64, the tokens that the LM head will see, in order, without padding.
        """
        used = frozenset(np.unique(ids).tolist()) - {0} if ids is not None else frozenset()
        if used != self._hooked:
            self._hook(used)
        if ids is None or not used:
            return
        self._ids, rules = ids, self._used_rules()
        self._tokens = share_out(ids, rules, self._model.device)
        if self._changes_logits:
            self._logits = share_out(ids[logit_rows.cpu().numpy()], rules, self._model.device)

    @contextmanager
    def within(self, places: NDArray[np.int64]) -> Iterator[None]:
        """Inside the block, modules see these places of the packed row, in this order."""
        if not self.is_used:
            yield
            return
        whole = self._tokens
        self._tokens = share_out(self._ids[places], self._used_rules(), self._model.device)
        try:
            yield
        finally:
            self._tokens = whole

    def _used_rules(self) -> dict[int, RowRule]:
        return {adapter_id: self._rules[adapter_id] for adapter_id in sorted(self._hooked)}

    def _hook(self, used: frozenset[int]) -> None:
        for handle in self._handles:
            handle.remove()
        self._tokens, self._logits, self._hooked = {}, {}, used
        self.is_used = bool(used)
        changes: dict[str, list[tuple[int, LowRank]]] = {}
        for adapter_id in sorted(used):
            for name, change in self._adapters[adapter_id].changes.items():
                changes.setdefault(name, []).append((adapter_id, change))
        targets = {name: self.targets.by_name[name] for name in changes}
        self._changes_logits = any(target.of_logits for target in targets.values())
        self._handles = [
            # Before the hook that sums a module's result over ranks.
            target.module.register_forward_hook(partial(self._add, changes[name], target.of_logits), prepend=True)
            for name, target in targets.items()
        ]

    def _add(
        self,
        changes: Sequence[tuple[int, LowRank]],
        of_logits: bool,
        _module: nn.Module,
        given: tuple[Any, ...],
        out: Any,
    ) -> None:
        shares = self._logits if of_logits else self._tokens
        rows, results = given[0].reshape(-1, given[0].shape[-1]), out.view(-1, out.shape[-1])
        for adapter_id, change in changes:
            for share in shares[adapter_id]:
                reduced = functional.linear(rows.index_select(0, share.gathered), change.down).mul_(change.scale)
                added = functional.linear(reduced, change.up)[: len(share.places)]
                # In place: this is the module's own result, not yet used elsewhere.
                results.index_add_(0, share.places, added.to(results.dtype))
