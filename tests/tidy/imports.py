"""Who imports whom in the package, read from the sources and never by importing them.

A *module* is a dotted name below closeranks ("ddp.wrapper"; "" is closeranks itself). Its *layer*
is the first part of it: a package or a file that stands directly below closeranks.

Two graphs are made of the same statements. The layer graph takes every import, those inside
functions and for the type checker included: they too say that one layer knows another. The cycle
graph takes only what runs when a module is imported, because only that can go round in a circle.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

NAME = "closeranks"
Graph = dict[str, set[str]]


@dataclass(frozen=True)
class Import:
    """One imported name, with where the statement stands and whether importing runs it."""

    target: str  # "torch.nn", "closeranks.ddp.wrapper.DistributedDataParallel"
    at_import: bool


def module_of(path: str) -> str:
    """The module that a path below src/closeranks holds."""
    return path.removesuffix(".py").removesuffix("__init__").rstrip("/").replace("/", ".")


def layer_of(module: str) -> str:
    return module.split(".")[0]


def imports(path: str, text: str) -> list[Import]:
    """Everything that a module imports, relative imports spelled out."""
    folder = path.split("/")[:-1]
    found = []
    for node, at_import in _statements(ast.parse(text).body, True):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, at_import) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = [NAME, *folder][: len(folder) + 2 - node.level]
                base = ".".join([*above, base] if base else above)
            found += [Import(f"{base}.{alias.name}", at_import) for alias in node.names]
    return found


def layer_graph(sources: Mapping[str, str]) -> Graph:
    """For each layer the other layers that it imports; the door itself is "" on either side."""
    graph: Graph = {layer_of(module_of(path)): set() for path in sources}
    modules = {module_of(path) for path in sources}
    for path, text in sources.items():
        layer = layer_of(module_of(path))
        for each in imports(path, text):
            for module in _modules_named(each.target, modules, package_too=False):
                graph[layer].add(layer_of(module))
        graph[layer].discard(layer)
    return graph


def cycles(sources: Mapping[str, str]) -> list[list[str]]:
    """The circles of modules that import one another while they are being imported."""
    modules = {module_of(path) for path in sources}
    graph: Graph = {}
    for path, text in sources.items():
        module = module_of(path)
        wanted = {
            target
            for each in imports(path, text)
            if each.at_import
            for target in _modules_named(each.target, modules, package_too=True)
            # Importing a package runs its __init__, unless one comes from inside: then it is
            # already running, and only a name taken from it counts.
            if not (module.startswith(f"{target}.") and _is_inside(each.target, target, modules))
        }
        graph[module] = wanted - {module, ""} if module else wanted - {module}
    return _circles(graph)


def foreign(path: str, text: str) -> set[str]:
    """The packages outside of ours that a module imports anywhere in it."""
    return {each.target.split(".")[0] for each in imports(path, text)} - {NAME}


def _statements(body: Iterable[ast.AST], at_import: bool) -> Iterator[tuple[ast.AST, bool]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner = False
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _statements(node.body, False)
            yield from _statements(node.orelse, at_import)
            continue
        else:
            inner = at_import
        yield node, at_import
        yield from _statements(ast.iter_child_nodes(node), inner)


def _modules_named(target: str, modules: set[str], package_too: bool) -> list[str]:
    """The longest of our modules that target names, and the packages on the way to it."""
    if target != NAME and not target.startswith(f"{NAME}."):
        return []
    parts = target.split(".")[1:]
    prefixes = [".".join(parts[:count]) for count in range(len(parts), -1, -1)]
    known = [
        prefix
        for prefix in prefixes
        if prefix in modules or not prefix or any(m.startswith(f"{prefix}.") for m in modules)
    ]
    return known if package_too else known[:1]


def _is_inside(target: str, package: str, modules: set[str]) -> bool:
    """Whether target names a module below package, rather than a name that package defines."""
    named = _modules_named(target, modules, package_too=False)[0]
    return named != package


def _circles(graph: Graph) -> list[list[str]]:
    """The strongly connected components of more than one module, by mutual reachability."""
    reach = {module: _reachable(graph, module) for module in graph}
    circles = {
        tuple(sorted(other for other in graph if other in reach[module] and module in reach[other]))
        for module in graph
        if module in reach[module]
    }
    return [list(circle) for circle in sorted(circles)]


def _reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += graph.get(module, ())
    return seen
