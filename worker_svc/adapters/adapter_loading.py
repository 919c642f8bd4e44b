"""PEFT adapters of one loaded model: read, checked against the model, kept on its device.

User page: docs/adapters.md.

Composes `files.py` and `config.py` (the folder), `targets.py` (fit with the model), `table.py` (ids) and
`layers.py` (arithmetic).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from svc_common.errors import ResourceExhausted
from worker_svc.adapters.config import refused
from worker_svc.adapters.files import AdapterFolder, open_adapter
from worker_svc.adapters.layers import AdapterLayers, LoraAdapter, LowRank, ProductRules
from worker_svc.adapters.table import AdapterTable
from worker_svc.adapters.targets import AdaptedLinear
from worker_svc.model.sharding.shards import WHOLE, Shard
from worker_svc.rows.table import RowTable

# Ranks are zero-padded to multiples of this: products with few columns are summed in different orders.
_RANK_UNIT = 16


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Maximum number of loaded adapters, and maximum rank of one."""

    max_adapters: int
    max_rank: int


class Adapters:
    """Loaded adapters of the model behind `layers`. Called from the engine's thread, between steps.

    `free_bytes`: free memory of the model's device. `shard`: this rank's part of the model.
    """

    def __init__(
        self, layers: AdapterLayers, limits: AdapterLimits, free_bytes: Callable[[], int], shard: Shard = WHOLE
    ) -> None:
        self._layers, self._limits, self._free_bytes, self._shard = layers, limits, free_bytes, shard
        self._rules = ProductRules()
        self._table: AdapterTable[LoraAdapter] = AdapterTable(self._read, max_adapters=limits.max_adapters)

    def settle(self, max_rows: int, *, strict: bool) -> None:
        """Set how rows must be padded, also for loaded adapters; see `ProductRules.settle`."""
        self._rules.settle(max_rows, strict=strict)
        self._announce()

    def load(self, adapter_id: int, path: str) -> LoraAdapter:
        """See AdapterTable. Raises InvalidArgument for a refused folder, ResourceExhausted if memory is short."""
        adapter = self._table.load(adapter_id, path)
        self._announce()
        return adapter

    def unload(self, adapter_id: int, rows: RowTable | None) -> None:
        """See AdapterTable. The adapter's memory is free on return."""
        if self._table.unload(adapter_id, rows):
            self._announce()

    def begin_owner(self) -> None:
        """See AdapterTable."""
        self._table.begin_owner()

    def guard(self, rows: RowTable) -> None:
        """Refuse rows of `rows` that name an adapter that is not loaded."""
        rows.guard(self._table.check_rows)

    def _announce(self) -> None:
        loaded = {adapter_id: self._table[adapter_id] for adapter_id in self._table.ids}
        self._layers.changed(loaded, {i: self._rules.rule_of(adapter) for i, adapter in loaded.items()})

    # --- reading -----------------------------------------------------------------------------------------------------

    def _read(self, path: Path) -> LoraAdapter:
        folder = open_adapter(path).part(self._shard)
        self._layers.targets.check(folder, self._limits.max_rank)
        try:
            adapter = self._build(folder)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise _no_memory(folder, "and does not fit into the device's memory") from error
        self._rules.rule_of(adapter)
        return adapter

    def _build(self, folder: AdapterFolder) -> LoraAdapter:
        self._check_memory(folder)
        changes = {}
        for name, down, up in folder.matrices():
            target = self._target(name)
            rank = _padded(down.shape[0])
            pair = (_filled(down, (rank, target.num_in), target), _filled(up, (target.num_out, rank), target))
            if not all(bool(matrix.isfinite().all()) for matrix in pair):
                dtype = str(pair[0].dtype).removeprefix("torch.")
                raise refused("ADAPTER_INVALID", f"the weights for {name} are not finite in {dtype}, the model's type")
            changes[name] = LowRank(*pair, folder.config.scale_of(name))
        num_bytes = sum(change.down.nbytes + change.up.nbytes for change in changes.values())
        rank = max(shapes.down[0] for shapes in folder.pairs.values())
        return LoraAdapter(changes, rank, num_bytes, folder.digest())

    def _target(self, name: str) -> AdaptedLinear:
        return self._layers.targets.by_name[name]

    def _check_memory(self, folder: AdapterFolder) -> None:
        needed = sum(self._num_bytes(name, shapes.down[0]) for name, shapes in folder.pairs.items())
        free = self._free_bytes()
        if needed > free:
            raise _no_memory(folder, f"and needs {needed} bytes, but {free} are free")

    def _num_bytes(self, name: str, rank: int) -> int:
        target = self._target(name)
        return _padded(rank) * (target.num_in + target.num_out) * target.dtype.itemsize


def _no_memory(folder: AdapterFolder, what: str) -> ResourceExhausted:
    return ResourceExhausted(
        f"the adapter in {folder.path} is of rank {folder.config.rank} {what}; unload another, or start the worker with a "
        "smaller cache",
        reason="ADAPTER_MEMORY",
    )


def _padded(rank: int) -> int:
    return -(-rank // _RANK_UNIT) * _RANK_UNIT


def _filled(stored: torch.Tensor, shape: tuple[int, int], target: AdaptedLinear) -> torch.Tensor:
    """The matrix in the module's dtype and on its device, zero-padded to `shape`."""
    made = torch.zeros(shape, dtype=target.dtype, device=target.device)
    made[: stored.shape[0], : stored.shape[1]] = stored
    return made
