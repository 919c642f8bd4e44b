"""LoRA adapters of the engine in this process: loaded once, at startup; requests name them as their model."""

from collections.abc import Mapping
from pathlib import Path

from scheduler_svc.adapter_names import AdapterNames
from svc_common.errors import ConfigError, NotFound, QuireError
from worker_svc.engine import Engine


class InProcessAdapters:
    """Owns the adapters' names and ids. `model`: the base model's name."""

    def __init__(self, model: str, engine: Engine, folders: Mapping[str, str]) -> None:
        """Load `folders`, by name, into `engine`. Raises ConfigError naming the adapter that failed, and why."""
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
        """Adapter id used in batch rows; 0 = no adapter. Raises NotFound."""
        return self._names.id_of(name)

    def named(self, name: str) -> str:
        """Adapter name for a request's model name; empty for the base model. Raises NotFound."""
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
