"""What a checker of house rules returns, and the source files it is given.

A checker is a function that takes text and returns findings; it opens no file, so that a test can
feed it a bad snippet and see it object. This module knows no rule.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "closeranks"


@dataclass(frozen=True)
class Finding:
    """One breach of a rule. The key is what an exception has to name: never a line number."""

    key: str
    what: str


def package_sources() -> dict[str, str]:
    """The text of every module of the package, by its path below src/closeranks."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {file.relative_to(PACKAGE).as_posix(): file.read_text("utf-8") for file in files}


def objections(findings: Iterable[Finding], exceptions: Mapping[str, str]) -> list[str]:
    """The findings that no exception covers, and the exceptions that cover no finding.

    An exception is a reason, by key. One without a finding has outlived its reason: it goes.
    """
    found = list(findings)
    keys = {finding.key for finding in found}
    unused = [
        f"{key}: excepted, but there is nothing to except" for key in exceptions.keys() - keys
    ]
    unexplained = [
        f"{key}: excepted without a reason" for key, why in exceptions.items() if not why
    ]
    open_findings = [f"{f.key}: {f.what}" for f in found if f.key not in exceptions]
    return sorted(open_findings + unused + unexplained)
