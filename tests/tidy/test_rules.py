"""The package keeps the house rules, and every rule has been seen to object to a bad snippet."""

import textwrap
from collections.abc import Callable, Mapping

import pytest

from tests.tidy import exceptions, rules
from tests.tidy.findings import PACKAGE, ROOT, Finding, objections, package_sources

Checker = Callable[[str, str], list[Finding]]

RULES: list[tuple[Checker, Mapping[str, str]]] = [
    (rules.docstring, {}),
    (rules.prints, exceptions.PRINTS),
    (rules.broad_excepts, exceptions.BROAD_EXCEPTS),
    (rules.long_functions, exceptions.LONG_FUNCTIONS),
    (rules.long_file, exceptions.LONG_FILES),
    (rules.many_parameters, exceptions.MANY_PARAMETERS),
    (rules.vague_name, {}),
]

LONG = "def f():\n" + "    x = 1\n" * 70

BAD: list[tuple[Checker, str, str]] = [
    (rules.docstring, "", "m.py"),
    (rules.docstring, "import os\n", "m.py"),
    (rules.docstring, '"""a title without an end\n\nMore."""\n', "m.py"),
    (rules.prints, "def f():\n    print(1)\n", "m.py::f"),
    (rules.prints, "print(1)\n", "m.py::<module>"),
    (rules.broad_excepts, "try:\n    f()\nexcept:\n    pass\n", "m.py::<module>"),
    (rules.broad_excepts, "try:\n    f()\nexcept Exception:\n    pass\n", "m.py::<module>"),
    (rules.broad_excepts, "try: f()\nexcept (OSError, BaseException): raise\n", "m.py::<module>"),
    (rules.broad_excepts, "with contextlib.suppress(Exception):\n    f()\n", "m.py::<module>"),
    (rules.long_functions, LONG, "m.py::f"),
    (rules.long_functions, "class A:\n" + textwrap.indent(LONG, "  "), "m.py::A.f"),
    (rules.long_file, "x = 1\n" * 301, "m.py"),
    (rules.many_parameters, "def f(a, b, c, /, d, e, f, *, g, h, i): ...\n", "m.py::f"),
    (rules.many_parameters, "def f(a, b, c, d, e, f, g, *h, **i): ...\n", "m.py::f"),
]

GOOD: list[tuple[Checker, str]] = [
    (rules.docstring, '"""What it is for."""\n'),
    (rules.prints, "def f(console):\n    console.print(1)\n"),
    (rules.broad_excepts, "try:\n    f()\nexcept (OSError, ValueError):\n    pass\n"),
    (rules.long_functions, "def f():\n" + "    x = 1\n" * 69),
    (rules.long_file, "x = 1\n" * 300),
    (rules.many_parameters, "class A:\n    def f(self, a, b, c, d, e, f, g, h): ...\n"),
]


@pytest.mark.parametrize(
    ("rule", "allowed"), RULES, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_package_keeps_the_rule(rule: Checker, allowed: Mapping[str, str]) -> None:
    found = [f for path, text in package_sources().items() for f in rule(path, text)]
    assert objections(found, allowed) == []


@pytest.mark.parametrize(("rule", "text", "key"), BAD)
def test_a_rule_objects(rule: Checker, text: str, key: str) -> None:
    assert [finding.key for finding in rule("m.py", text)] == [key]


@pytest.mark.parametrize(("rule", "text"), GOOD)
def test_a_rule_is_content(rule: Checker, text: str) -> None:
    assert rule("m.py", text) == []


@pytest.mark.parametrize(
    "path", ["utils.py", "ddp/_helpers.py", "core/plan.py", "reducer_part2.py"]
)
def test_vague_names_are_objected_to(path: str) -> None:
    assert [finding.key for finding in rules.vague_name(path)] == [path]


def test_no_file_anywhere_has_a_vague_name() -> None:
    folders = ("src", "tests", "bench", "examples")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    found = [f for file in files for f in rules.vague_name(file.relative_to(ROOT).as_posix())]
    assert objections(found, {}) == []


def test_every_folder_of_the_package_is_a_package() -> None:
    """A folder without __init__.py would be left out of what is installed."""
    folders = {(PACKAGE / path).parent for path in package_sources()}
    assert [f.name for f in folders if not (f / "__init__.py").exists()] == []


def test_every_rule_has_a_bad_snippet() -> None:
    """vague_name is a rule about paths and has a test of its own."""
    assert {rule for rule, _ in RULES} - {rule for rule, _, _ in BAD} == {rules.vague_name}


def test_an_exception_needs_a_finding_and_a_reason() -> None:
    found = [Finding("a.py", "too long"), Finding("b.py", "too long")]
    assert objections(found, {"a.py": "a table", "b.py": ""}) == ["b.py: excepted without a reason"]
    assert objections(found[:1], {}) == ["a.py: too long"]
    assert len(objections([], {"a.py": "a table"})) == 1
