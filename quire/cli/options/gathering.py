"""Groups of options that several commands share: the command takes one value, its help lists the options."""

import inspect
from collections.abc import Callable
from typing import Any


def gathers(**collectors: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: a parameter named here is made by its collector; the collector's own parameters become the options."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            made = {name: _collect(collector, given) for name, collector in collectors.items()}
            command(**given, **made)

        parts = [
            part
            for name, own in _parameters(command).items()
            for part in (_parameters(collectors[name]).values() if name in collectors else [own])
        ]
        all_parts = [part.replace(kind=inspect.Parameter.KEYWORD_ONLY) for part in parts]
        run.__signature__ = inspect.Signature(all_parts)  # type: ignore[attr-defined]
        run.__annotations__ = {part.name: part.annotation for part in all_parts}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def _collect(collector: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Takes what is the collector's out of `given`."""
    return collector(**{name: given.pop(name) for name in _parameters(collector)})
