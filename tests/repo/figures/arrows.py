"""Imports that run upwards inside a package.

In every package of the product, an arrow leads from one child (a module or a folder) to another that it imports, at any level of
a file. Children of a package have an order, from high to low, if no arrows form a circle; arrows in a circle cannot all point
downwards. Counted are the imports that would have to be cut or turned for an order to exist: for each circle the fewest, exactly up
to 16 children, above that by a heuristic.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from tests.repo.figures.sources import Sources

_EXACT = 16
# Imports by the children that they are from and to, as "importing module -> imported module".
Arrows = Mapping[tuple[str, str], list[str]]


def upward_imports(sources: Sources) -> list[str]:
    """The fewest imports that break all circles between a package's children: "package: importing module -> imported module"."""
    modules = {_module(name): name for name in sources.python()}
    packages: defaultdict[str, defaultdict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    for importer in sorted(modules):
        for imported in sorted(_imports(sources, modules, importer)):
            package, arrow = _arrow(importer, imported)
            if package and arrow[0] != arrow[1]:
                packages[package][arrow].append(f"{importer} -> {imported}")
    return [
        f"{package}: {found}"
        for package, arrows in sorted(packages.items())
        for circle in _circles(arrows)
        for found in _upward(arrows, circle)
    ]


def _module(name: str) -> str:
    return name.removeprefix("kernels/").removesuffix(".py").replace("/", ".")


def _imports(sources: Sources, modules: Mapping[str, str], importer: str) -> Iterator[str]:
    """Modules of the product that one imports; a package's own names are of its `__init__`."""
    outline = sources.outline(modules[importer])
    found = {_known(modules, name) for name in outline.imports}
    found |= {_known(modules, f"{module}.{name}") or _known(modules, module) for module, name in outline.names}
    return (name for name in found if name)


def _known(modules: Mapping[str, str], name: str) -> str:
    return next((known for known in (name, f"{name}.__init__") if known in modules), "")


def _arrow(importer: str, imported: str) -> tuple[str, tuple[str, str]]:
    """The innermost package that has both, and which of its children imports which."""
    ours, theirs = importer.split("."), imported.split(".")
    depth = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
    if not depth:
        return "", ("", "")
    return ".".join(ours[:depth]), (ours[depth], theirs[depth])


def _circles(arrows: Arrows) -> list[set[str]]:
    """Children that can be reached from each other: strongly connected components of more than one."""
    children = {child for arrow in arrows for child in arrow}
    reach = {child: {b for a, b in arrows if a == child} for child in children}
    for middle in children:
        for child in children:
            if middle in reach[child]:
                reach[child] |= reach[middle]
    groups = {frozenset({child, *(other for other in reach[child] if child in reach[other])}) for child in children}
    return [set(group) for group in groups if len(group) > 1]


def _upward(arrows: Arrows, circle: set[str]) -> Iterator[str]:
    """Imports that point upwards in the best order of the circle's children."""
    children = sorted(circle)
    weight = [[len(arrows.get((a, b), ())) for b in children] for a in children]
    order = _exact(weight) if len(children) <= _EXACT else _greedy(weight)
    for place, child in enumerate(order):
        for above in order[:place]:
            yield from arrows.get((children[child], children[above]), ())


def _exact(weight: list[list[int]]) -> list[int]:
    """Best order, high to low, by dynamic programming over sets of children that stand above."""
    count = len(weight)
    cost, last = [0] + [1 << 30] * ((1 << count) - 1), [0] * (1 << count)
    for above in range(1 << count):
        for child in range(count):
            if above >> child & 1:
                continue
            new = cost[above] + sum(weight[child][other] for other in range(count) if above >> other & 1)
            if new < cost[above | 1 << child]:
                cost[above | 1 << child], last[above | 1 << child] = new, child
    order, left = [], (1 << count) - 1
    while left:
        order.append(last[left])
        left ^= 1 << last[left]
    return order[::-1]


def _greedy(weight: list[list[int]]) -> list[int]:
    """The child that imports most and is imported least becomes the highest of those left, again and again."""
    left, order = set(range(len(weight))), []
    while left:
        order.append(max(sorted(left), key=lambda i: sum(weight[i][j] - weight[j][i] for j in left)))
        left.remove(order[-1])
    return order
