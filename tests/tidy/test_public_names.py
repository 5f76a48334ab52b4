"""The public surface is one sorted list, and every name on it can be had."""

import ast
import subprocess
import sys

import closeranks
from tests.tidy.findings import PACKAGE


def test_the_names_are_sorted_and_unique() -> None:
    assert list(closeranks.__all__) == sorted(set(closeranks.__all__))


def test_every_name_resolves() -> None:
    missing = [name for name in closeranks.__all__ if getattr(closeranks, name, None) is None]
    assert missing == []


def test_every_name_is_found_by_completion() -> None:
    assert set(closeranks.__all__) <= set(dir(closeranks))


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(closeranks, "no_such_name")


def test_the_names_are_written_down_where_a_reader_looks() -> None:
    """A list that is computed can be seen neither by a type checker nor by a reader."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text("utf-8"))
    written = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert written == [closeranks.__all__]


def test_a_star_import_gives_just_these_names() -> None:
    program = (
        "from closeranks import *\n"
        "import closeranks\n"
        "names = {n for n in dir() if not n.startswith('__')} - {'closeranks'}\n"
        "assert names == {n for n in closeranks.__all__ if not n.startswith('__')}, names\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
