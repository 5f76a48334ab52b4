"""Shows the verdicts, as lines for people or as JSON; 1 if one of them is an error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from closeranks.doctor.checks import ERROR, OK, WARNING, Verdict, check, counted
from closeranks.doctor.facts import gather

_COLOURS = {OK: 32, WARNING: 33, ERROR: 31}


def doctor(as_json: bool) -> int:
    """Look, judge, show."""
    verdicts = check(gather())
    has_error = any(verdict.level == ERROR for verdict in verdicts)
    if as_json:
        told = {"ok": not has_error, "checks": [asdict(verdict) for verdict in verdicts]}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        sys.stdout.write("\n".join(lines(verdicts, is_coloured)) + "\n")
    return 1 if has_error else 0


def lines(verdicts: Sequence[Verdict], is_coloured: bool) -> list[str]:
    """A line for each, another for its remedy, and one for all of them."""
    width = max(len(verdict.name) for verdict in verdicts)
    found = []
    for verdict in verdicts:
        level = f"{verdict.level:7}"
        if is_coloured:
            level = f"\x1b[{_COLOURS[verdict.level]}m{level}\x1b[0m"
        found.append(f"{level}  {verdict.name:{width}}  {verdict.what}")
        if verdict.remedy:
            found.append(f"{'':9}{'':{width}}  -> {verdict.remedy}")
    counts = [sum(verdict.level == level for verdict in verdicts) for level in (ERROR, WARNING)]
    if any(counts):
        found.append(f"{counted(counts[0], 'error')}, {counted(counts[1], 'warning')}.")
    else:
        found.append("Nothing is wrong.")
    return found
