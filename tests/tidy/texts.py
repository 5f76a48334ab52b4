"""The house rules about everything that is read: documents, settings, and source as text.

Each checker takes a path below the root of the repository and the text of that file. The patterns
are spelled with a bracket in every word they forbid, so that this file keeps its own rules.
"""

import re
from pathlib import Path, PurePosixPath

from tests.tidy.findings import ROOT, Finding

README_LINES_MAX = 149
_FOLDERS = (".ci", "bench", "docs", "examples", "src", "tests")
_TEXTS = (".md", ".py", ".toml", ".txt", ".cfg", ".c", ".h", ".json", ".sh", ".yml", ".yaml")

_UNFINISHED = re.compile(r"\b(TO[D]O|FIXM[E]|XX[X]|HAC[K])\b")
_REGISTRY = re.compile(
    r"py[p]i\.org|pythonhoste[d]\.org|anacond[a]\.(org|com)|download\.pytorc[h]|conda-forg[e]"
    r"|--(extra-)?inde[x]-url|--find-link[s]",
    re.IGNORECASE,
)
_ONE_MACHINE = re.compile(r"(?<![\w.])/(hom[e]|roo[t]|wor[k]|User[s])/")
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def repository_texts() -> dict[str, str]:
    """Every text of the repository that belongs to it, by its path below the root."""
    files = [file for file in ROOT.iterdir() if file.is_file()]
    for folder in _FOLDERS:
        files += [file for file in (ROOT / folder).rglob("*") if file.is_file()]
    kept = [
        f
        for f in files
        if f.suffix in _TEXTS or (f.suffix == "" and f.name not in (".coverage", ".git"))
    ]
    kept = [f for f in kept if not any(p.endswith(("__pycache__", ".egg-info")) for p in f.parts)]
    return {file.relative_to(ROOT).as_posix(): file.read_text("utf-8") for file in sorted(kept)}


def unfinished(path: str, text: str) -> list[Finding]:
    """What is not done is an issue, or a sentence in the changelog, and no mark in the source."""
    return _lines_with(_UNFINISHED, path, text, "is a mark of unfinished work")


def registries(path: str, text: str) -> list[Finding]:
    """Where packages come from is the user's choice, made in the settings of pip."""
    return _lines_with(_REGISTRY, path, text, "names a place to get packages from")


def machines(path: str, text: str) -> list[Finding]:
    """A path of one machine means nothing on another."""
    return _lines_with(_ONE_MACHINE, path, text, "is a path of one machine")


def links(path: str, text: str) -> list[Finding]:
    """A relative link in a document leads to a file that exists, and to a heading in it."""
    if not path.endswith(".md"):
        return []
    return [
        Finding(path, f"the link {target} leads nowhere")
        for match in _LINK.finditer(_FENCE.sub("", text))
        if not _leads_somewhere(path, target := match[1] or match[2], text)
    ]


def long_readme(path: str, text: str) -> list[Finding]:
    """The first page is one that is read to its end."""
    lines = len(text.splitlines())
    if path == "README.md" and lines > README_LINES_MAX:
        return [Finding(path, f"{lines} lines, at most {README_LINES_MAX}")]
    return []


def anchors(text: str) -> set[str]:
    """The names by which the headings of a document can be linked to."""
    headings = re.findall(r"^#+ +(.+?) *#*$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _lines_with(pattern: re.Pattern[str], path: str, text: str, what: str) -> list[Finding]:
    return [
        Finding(path, f"line {number}: {match[0]!r} {what}")
        for number, line in enumerate(text.splitlines(), 1)
        for match in pattern.finditer(line)
    ]


def _leads_somewhere(path: str, target: str, text: str) -> bool:
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return True
    place, _, anchor = target.partition("#")
    if not place:
        return anchor in anchors(text)
    file = Path(ROOT, PurePosixPath(path).parent, place)
    if anchor and file.suffix == ".md" and file.is_file():
        return anchor in anchors(file.read_text("utf-8"))
    return file.exists() and ROOT in [file.resolve(), *file.resolve().parents]
