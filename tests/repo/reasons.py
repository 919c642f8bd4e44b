"""Which reasons the code gives to which errors, read from its syntax: literals, names with literal values, arguments of helpers."""

import ast
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from svc_common import errors
from tests.support.outline import blocks_of, statements
from tests.support.tree import ROOT

SERVICES = (
    "gateway_svc",
    "scheduler_svc",
    "worker_svc",
    "svc_common",
    "block_manager",
    "kernels",
    "quire_tools/simulated_worker",
    "quire_tools/replay/what_if.py",
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Found:
    """Reasons by status; `unread`: places whose reason cannot be read from the code."""

    by_status: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    unread: list[str] = field(default_factory=list)


class _Reader:
    """Reads all modules of one service: `statuses` of its error classes and `helpers`, functions that make an error with the reason
    that they are given."""

    def __init__(self, service: str, found: Found) -> None:
        self._found = found
        source = ROOT / service
        paths = sorted(source.rglob("*.py")) if source.is_dir() else [source]
        self._texts = {path: path.read_text() for path in paths}
        self._trees = {path: ast.parse(text) for path, text in self._texts.items()}
        self._statuses = {
            name: cls.status
            for name, cls in vars(errors).items()
            if isinstance(cls, type) and issubclass(cls, errors.QuireError)
        }
        for tree in self._trees.values():
            self._learn_classes(tree)
        self._helpers = dict(
            helper for path in self._naming("reason") for helper in self._helpers_in(self._trees[path])
        )

    def read(self) -> None:
        for path in self._naming("reason", *self._helpers):
            for function, cls in _functions(self._trees[path]):
                for call in _calls(function):
                    self._read_call(path, function, cls, call)

    def _naming(self, *words: str) -> list[Path]:
        """Files that contain one of these: calls in others are of no interest."""
        return [path for path, text in self._texts.items() if any(word in text for word in words)]

    def _learn_classes(self, tree: ast.Module) -> None:
        for node in statements(tree):
            for base in node.bases if isinstance(node, ast.ClassDef) else ():
                if isinstance(base, ast.Name) and base.id in self._statuses:
                    self._statuses.setdefault(node.name, self._statuses[base.id])  # type: ignore[attr-defined]

    def _helpers_in(self, tree: ast.Module) -> Iterator[tuple[str, str]]:
        for function, _ in _functions(tree):
            given = {argument.arg for argument in function.args.args}
            for call in _calls(function):
                reason, status = _reason_of(call), self._statuses.get(_name_of(call))
                if status and isinstance(reason, ast.Name) and reason.id in given:
                    yield function.name, status

    def _read_call(self, path: Path, function: ast.FunctionDef, cls: str, call: ast.Call) -> None:
        name = _name_of(call)
        status = self._statuses.get(cls if name in {"__init__", "cls"} else name)
        reason = _reason_of(call)
        if status and reason is not None:
            self._note(f"{path.relative_to(ROOT)}:{call.lineno}", function, reason, status)
        elif name in self._helpers and call.args:
            self._found.by_status[self._helpers[name]] |= _literals(call.args[0])

    def _note(self, place: str, function: ast.FunctionDef, reason: ast.expr, status: str) -> None:
        values = _literals(reason)
        if isinstance(reason, ast.Name):
            values = {value for assigned in _assigned(function, reason.id) for value in _literals(assigned)}
        self._found.by_status[status] |= values
        passes_on = isinstance(reason, ast.Attribute) and reason.attr == "reason"
        if not (values or passes_on or function.name in self._helpers):
            self._found.unread.append(place)


def reasons_in_code() -> Found:
    """Of all services."""
    found = Found()
    for service in SERVICES:
        _Reader(service, found).read()
    return found


def _functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Functions with the name of the class that each is in."""
    for node in (tree, *statements(tree)):
        for child in itertools.chain(*blocks_of(node)):
            if isinstance(child, _FUNCTIONS):
                yield child, node.name if isinstance(node, ast.ClassDef) else ""  # type: ignore[misc]


def _calls(function: ast.FunctionDef) -> Iterator[ast.Call]:
    return (node for node in ast.walk(function) if isinstance(node, ast.Call))


def _name_of(call: ast.Call) -> str:
    called = call.func
    return called.id if isinstance(called, ast.Name) else str(getattr(called, "attr", ""))


def _reason_of(call: ast.Call) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == "reason"), None)


def _assigned(function: ast.FunctionDef, name: str) -> Iterator[ast.expr]:
    """Values that a local name gets."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            yield node.value


def _literals(value: ast.expr) -> set[str]:
    """Reasons that an expression is one of."""
    if isinstance(value, ast.Constant):
        return {value.value} if isinstance(value.value, str) and value.value.isupper() else set()
    return _literals(value.body) | _literals(value.orelse) if isinstance(value, ast.IfExp) else set()
