"""Tiny random checkpoints of models with states."""

from pathlib import Path

from tests.worker.families.tiny_configs import Fields, merged, tiny_config
from tests.worker.families.trial import _saved


def state_checkpoint(model_type: str, path: Path, **changes: object) -> Path:
    """The checkpoint of this type that the table of families has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fields: Fields = merged(tiny_config(model_type), changes)
    return _saved(fields, path, seed=0)
