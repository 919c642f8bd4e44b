"""Block tables of consecutive steps as changes. Pure."""

from collections.abc import Mapping

from gateway_svc.lab.source import TableChange

Tables = Mapping[str, list[str]]


class TableChanges:
    """Holds the tables sent last."""

    def __init__(self) -> None:
        self._told: Tables | None = None

    def to(self, tables: Tables) -> TableChange:
        """Return the changes from the tables sent last to `tables`, and keep these. The first time: all of them."""
        last, self._told = self._told, tables
        if last is None:
            return TableChange(whole=True, changed=dict(tables), gone=[])
        changed = {name: blocks for name, blocks in tables.items() if last.get(name) != blocks}
        return TableChange(whole=False, changed=changed, gone=[name for name in last if name not in tables])
