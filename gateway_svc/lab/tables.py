"""Block tables of one step after the other, told as what changed. Pure."""

from collections.abc import Mapping

from gateway_svc.lab.source import TableChange

Tables = Mapping[str, list[str]]


class TableChanges:
    """Owner of the tables that were told last."""

    def __init__(self) -> None:
        self._told: Tables | None = None

    def to(self, tables: Tables) -> TableChange:
        """What makes those told last into `tables`, which are then the last. The first time: all of them."""
        last, self._told = self._told, tables
        if last is None:
            return TableChange(whole=True, changed=dict(tables), gone=[])
        changed = {name: blocks for name, blocks in tables.items() if last.get(name) != blocks}
        return TableChange(whole=False, changed=changed, gone=[name for name in last if name not in tables])
