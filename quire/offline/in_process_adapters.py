"""LoRA adapters of the engine in this process: loaded once, at the start; requests name them as the model."""

from collections.abc import Mapping
from pathlib import Path

from scheduler_svc.adapter_names import AdapterNames
from svc_common.errors import ConfigError, NotFound, QuireError
from worker_svc.engine import Engine


class InProcessAdapters:
    """Owner of their names and numbers. `model`: the base model's name."""

    def __init__(self, model: str, engine: Engine, folders: Mapping[str, str]) -> None:
        """Loads `folders`, by name, into `engine`. ConfigError names the adapter that cannot be, and why."""
        self._model = model
        self._names = AdapterNames()
        for name, folder in folders.items():
            try:
                self._load(engine, name, folder)
            except QuireError as error:
                raise ConfigError(
                    f"adapters[{name!r}]: {error.message}", reason=error.reason, metadata=error.metadata
                ) from None

    def _load(self, engine: Engine, name: str, folder: str) -> None:
        if name == self._model:
            raise ConfigError(f"has the name of the model, {self._model}; choose another", reason="ADAPTER_EXISTS")
        adapter = self._names.new(name, folder)
        path = str(Path(folder).expanduser())
        adapter.num_bytes, adapter.rank = engine.load_adapter(adapter.adapter_id, path)
        self._names.put(adapter)

    def id_of(self, name: str) -> int:
        """The number by which rows name it, 0 for none. NotFound."""
        return self._names.id_of(name)

    def named(self, name: str) -> str:
        """The adapter meant by what a request gives as its model: empty for the base model. NotFound."""
        if name in ("", self._model):
            return ""
        if name not in self._names.names:
            known = ", ".join([self._model, *self._names.names])
            raise NotFound(
                f"there is no model or adapter {name!r} here; there are: {known}; adapters are named when the LLM is made: "
                f"LLM(..., adapters={{{name!r}: FOLDER}})",
                reason="UNKNOWN_MODEL",
                resource_type="model",
                resource_name=name,
            )
        return name
