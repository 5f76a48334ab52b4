"""How results are kept: a dated folder with the command, the machine, the commit and raw numbers.

Knows nothing of what was measured.
"""

from __future__ import annotations

import datetime
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

WIDTH = 100
_RESULTS = Path(__file__).parent / "results"


def keep(
    what: str,
    command: str,
    environment: Mapping[str, str],
    text: str,
    raw: Any,
    pictures: Sequence[str] = (),
) -> Path:
    """Write the folder and return it; the pictures are shown in its page and drawn by others."""
    folder = _unused_folder(f"{datetime.date.today().isoformat()}-{what}")
    folder.mkdir(parents=True)
    facts = "\n".join(f"- {key}: {value}" for key, value in environment.items())
    shown = "".join(f"![{Path(name).stem}]({name})\n\n" for name in pictures)
    (folder / "README.md").write_text(
        f"# {folder.name}\n\n```sh\n{command}\n```\n\n{facts}\n\n"
        f"Raw numbers: [raw.json](raw.json).\n\n{shown}```text\n{text}```\n",
        "utf-8",
    )
    write_json(folder / "raw.json", raw)
    return folder


def write_json(path: Path, raw: Any) -> None:
    path.write_text(json.dumps(_rounded(raw)) + "\n", "utf-8")


def as_text(parts: Sequence[RenderableType]) -> str:
    """As a terminal of the usual width would show it, without colours."""
    shown = io.StringIO()
    console = Console(width=WIDTH, file=shown, color_system=None)
    for part in parts:
        console.print(part, soft_wrap=False, highlight=False)
    return "\n".join(line.rstrip() for line in shown.getvalue().splitlines()) + "\n"


def table(title: str, columns: Sequence[str], left: Sequence[str]) -> Table:
    """An empty table; the columns named in `left` hold text."""
    made = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in columns:
        made.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return made


def _unused_folder(name: str) -> Path:
    folder, number = _RESULTS / name, 2
    while folder.exists():
        folder, number = _RESULTS / f"{name}-{number}", number + 1
    return folder


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
