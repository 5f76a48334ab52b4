"""The house rules that one module can break by itself, each as a function of its source text.

Every checker takes the module's path below src/closeranks and its text, and returns findings. What
may break a rule nevertheless stands with its reason in exceptions.py; this file knows no name of
the project.
"""

import ast
from collections.abc import Iterator
from pathlib import PurePosixPath

from tests.tidy.findings import Finding

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 300
PARAMETERS_MAX = 8
_VAGUE_NAMES = ("utils", "util", "helpers", "helper", "common", "core", "misc")
_BROAD = ("Exception", "BaseException")

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def docstring(path: str, text: str) -> list[Finding]:
    """A module opens with a paragraph of whole sentences that says what it is for."""
    paragraph = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].strip()
    if not paragraph:
        return [Finding(path, "no docstring: say what this file is for and what it must not know")]
    if paragraph[-1] not in ".:!?":
        return [Finding(path, "the first paragraph of the docstring is not a sentence")]
    return []


def prints(path: str, text: str) -> list[Finding]:
    """A library does not write on its user's screen by itself."""
    return [
        Finding(f"{path}::{name}", f"line {node.lineno} prints: log, raise or return it instead")
        for name, node in _with_scopes(ast.parse(text))
        if isinstance(node, ast.Call) and _name(node.func) == "print"
    ]


def broad_excepts(path: str, text: str) -> list[Finding]:
    """An except clause, or a suppress, names the errors that it expects."""
    found = []
    for name, node in _with_scopes(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type):
            found.append((name, node.lineno))
        elif isinstance(node, ast.Call) and _name(node.func) == "suppress":
            found += [(name, node.lineno) for argument in node.args if _is_broad(argument)]
    return [Finding(f"{path}::{n}", f"line {i} catches every error: name them") for n, i in found]


def long_functions(path: str, text: str) -> list[Finding]:
    """A function fits on a screen, its docstring included."""
    found = []
    for name, node in _with_scopes(ast.parse(text)):
        if isinstance(node, _Function):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                what = f"{lines} lines, at most {FUNCTION_LINES_MAX}"
                found.append(Finding(f"{path}::{_join(name, node.name)}", what))
    return found


def long_file(path: str, text: str) -> list[Finding]:
    """A file is read in one go. Split by noun."""
    lines = len(text.splitlines())
    if lines > FILE_LINES_MAX:
        return [Finding(path, f"{lines} lines, at most {FILE_LINES_MAX}: split it by noun")]
    return []


def many_parameters(path: str, text: str) -> list[Finding]:
    """A function takes a handful of values; more of them are an options object."""
    found = []
    for name, node in _with_scopes(ast.parse(text)):
        if isinstance(node, _Function):
            count = len(_parameters(node))
            if count > PARAMETERS_MAX:
                what = f"{count} parameters, at most {PARAMETERS_MAX}: make an options object"
                found.append(Finding(f"{path}::{_join(name, node.name)}", what))
    return found


def vague_name(path: str, text: str = "") -> list[Finding]:
    """A file is named after the noun it holds."""
    parts = [part.removesuffix(".py").strip("_").lower() for part in PurePosixPath(path).parts]
    vague = [part for part in parts if part in _VAGUE_NAMES or "_part" in part]
    return [Finding(path, f"{part!r} says nothing: name the noun") for part in vague]


def _with_scopes(tree: ast.AST, scope: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every node below tree with the dotted name of the function or class it stands in."""
    for node in ast.iter_child_nodes(tree):
        yield scope or "<module>", node
        inner = scope
        if isinstance(node, _Function | ast.ClassDef):
            inner = _join(scope, node.name)
        yield from _with_scopes(node, inner)


def _join(scope: str, name: str) -> str:
    return name if scope in ("", "<module>") else f"{scope}.{name}"


def _name(node: ast.AST | None) -> str:
    """The last part of a dotted name; a call to a method called print is not a print."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and node.attr != "print":
        return node.attr
    return ""


def _is_broad(node: ast.AST | None) -> bool:
    if node is None:
        return True
    if isinstance(node, ast.Tuple):
        return any(_is_broad(element) for element in node.elts)
    return _name(node) in _BROAD


def _parameters(node: _Function) -> list[str]:
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    stars = [star for star in (node.args.vararg, node.args.kwarg) if star]
    return [a.arg for a in [*named, *stars] if a.arg not in ("self", "cls")]
