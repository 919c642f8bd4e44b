"""Triton's interpreter, without work that it repeats at every call of a function within a kernel, and at every operator."""

from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter


def patch_once_per_launch() -> None:
    """From now on in this process a launch replaces `triton.language` once per module, which else takes a third of the time.

    Types are looked up once each, which else takes a twelfth.
    """
    if not isinstance(interpreter._patch_lang, _PatchOnce):
        interpreter._patch_lang = _PatchOnce(interpreter._patch_lang)
        interpreter._get_np_dtype = _ByName(interpreter._get_np_dtype)


class _PatchOnce:
    """Replaces what the functions of a module see of `triton.language`, unless this launch did already."""

    def __init__(self, patch: Callable[..., Any]) -> None:
        self._patch = patch
        self._modules: set[str] = set()

    def __call__(self, function: Any) -> Any:
        module, is_launch = function.__module__, not self._modules
        if module in self._modules:
            return None
        self._modules.add(module)
        scope = self._patch(function)
        if is_launch:
            restore = scope.restore
            scope.restore = lambda: (self._modules.clear(), restore())
        return scope


class _ByName:
    """What the interpreter's function says of a type; it looks at no more than its element's name."""

    def __init__(self, look_up: Callable[[Any], Any]) -> None:
        self._look_up = look_up
        self._found: dict[str, Any] = {}

    def __call__(self, kind: Any) -> Any:
        name = kind.scalar.name
        if name not in self._found:
            self._found[name] = self._look_up(kind)
        return self._found[name]
