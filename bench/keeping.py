"""How results are kept: a dated folder with the command, the machine, the commit and raw numbers.

Knows nothing of what was measured.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
