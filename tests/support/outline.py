"""What Python files import and define, read from their syntax once per process. Trees are not kept: they are large."""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Outline:
    """`imports`: what `import` names; `names`: (module, name) of absolute `from module import name`, both at any level;
    `functions`: (number of lines, name) at any level; `classes`: names at the top level."""

    imports: tuple[str, ...]
    names: tuple[tuple[str, str], ...]
    functions: tuple[tuple[int, str], ...]
    classes: tuple[str, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """Dotted names of all imports; that of `from a.b import c` is a.b.c, which may be a module."""
        return (*self.imports, *(f"{module}.{name}" for module, name in self.names))


@functools.cache
def outline(path: Path) -> Outline:
    """Of the file at an absolute path."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(statements(tree))
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return Outline(
        tuple(alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names),
        tuple((str(node.module), alias.name) for node in froms for alias in node.names),
        tuple(((node.end_lineno or node.lineno) - node.lineno + 1, node.name) for node in functions),
        tuple(node.name for node in tree.body if isinstance(node, ast.ClassDef)),
    )


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements of a file at every level, handlers and cases included. Expressions, nine nodes of ten, are not entered."""
    blocks = blocks_of(tree)
    while blocks:
        for node in blocks.pop():
            yield node
            blocks += blocks_of(node)


def blocks_of(node: ast.AST) -> list[list[ast.AST]]:
    """The statements below a statement, as lists; also its handlers or cases."""
    return [block for name in _block_fields(type(node)) if (block := getattr(node, name))]


@functools.cache
def _block_fields(kind: type[ast.AST]) -> tuple[str, ...]:
    return tuple(name for name in kind._fields if name in {"body", "orelse", "finalbody", "handlers", "cases"})
