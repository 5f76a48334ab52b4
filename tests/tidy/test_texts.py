"""The documents are whole and speak of the project alone, and each rule has been seen to object."""

from collections.abc import Callable, Mapping

import pytest

from tests.tidy import texts
from tests.tidy.findings import Finding, objections

Checker = Callable[[str, str], list[Finding]]

RULES: list[tuple[Checker, Mapping[str, str]]] = [
    (texts.unfinished, {}),
    (texts.registries, {}),
    (texts.machines, {}),
    (texts.links, {}),
    (texts.long_readme, {}),
]

BAD: list[tuple[Checker, str, str]] = [
    (texts.unfinished, "m.py", "x = 1  # TO" + "DO: more\n"),
    (texts.unfinished, "a.md", "FIX" + "ME\n"),
    (texts.registries, "README.md", "from py" + "pi.org\n"),
    (texts.registries, "Makefile", "pip install --extra-ind" + "ex-url=somewhere torch\n"),
    (texts.machines, "a.md", "see /ho" + "me/me/notes\n"),
    (texts.machines, "run.sh", "cd /wo" + "rk/x\n"),
    (texts.links, "README.md", "[here](docs/no-such-page.md)\n"),
    (texts.links, "README.md", "# A\n\n[there](#no-such-heading)\n"),
    (texts.links, "docs/architecture.md", "[there](../README.md#no-such-heading)\n"),
    (texts.links, "README.md", "![picture](docs/no-such.png)\n"),
    (texts.links, "README.md", "[outside](../../../..)\n"),
    (texts.long_readme, "README.md", "\n" * 150),
]

GOOD: list[tuple[Checker, str, str]] = [
    (texts.unfinished, "a.md", "what is to do\n"),
    (texts.machines, "a.md", "docs/work/x, ../home/x and /tmp/x\n"),
    (texts.links, "README.md", "[a](docs) [b](https://example.org/x) [c](#some-a)\n\n# Some A\n"),
    (texts.links, "README.md", "```\n[not a link](nowhere)\n```\n"),
    (texts.long_readme, "docs/long.md", "\n" * 1000),
]


@pytest.mark.parametrize(
    ("rule", "allowed"), RULES, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_repository_keeps_the_rule(rule: Checker, allowed: Mapping[str, str]) -> None:
    found = [f for path, text in texts.repository_texts().items() for f in rule(path, text)]
    assert objections(found, allowed) == []


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_a_rule_objects(rule: Checker, path: str, text: str) -> None:
    assert [finding.key for finding in rule(path, text)] == [path]


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_a_rule_is_content(rule: Checker, path: str, text: str) -> None:
    assert rule(path, text) == []


def test_every_rule_has_a_bad_text() -> None:
    assert {rule for rule, _ in RULES} == {rule for rule, _, _ in BAD}


def test_the_texts_are_found() -> None:
    found = texts.repository_texts().keys()
    wanted = {"README.md", "Makefile", ".ci/run", "constraints.txt", "tests/tidy/texts.py"}
    assert found >= wanted


def test_headings_are_named_as_they_are_linked() -> None:
    assert texts.anchors("# One: two `three`\n```\n# none\n```\n## A-b c") == {
        "one-two-three",
        "a-b-c",
    }
