"""Python finds this in every process that has the folder on its path: what runs a worker's steps is watched once it is imported.

The process is the one that `quire up` starts, with its command and arguments; see `kill_signs` and `kill_moments`.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_WATCHES = {
    "worker_svc.executor.step_runner": ("tests.support.stack.kill_moments", "watch_steps"),
    "quire_tools.simulated_worker.engine": ("tests.support.stack.kill_signs", "watch_simulated"),
}


class _Watches(MetaPathFinder):
    """Lets imports be, and puts hooks in after them."""

    def __init__(self) -> None:
        self._left = dict(_WATCHES)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._left:
            return None
        module_name, watch = self._left.pop(fullname)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_watch(module: ModuleType) -> None:
            execute(module)
            getattr(importlib.import_module(module_name), watch)()

        spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Watches())
