"""Slurm's compressed lists: node names ("node[01-03,07],gpu2") and task counts ("4(x2),1").

Pure text in, tuples out. Knows nothing of environment variables or of the network.

A hostlist is a comma-separated list of names; a name may hold any number of brackets, each a
comma-separated list of numbers and ranges. Ranges keep the width of their first number
("[08-10]" is 08, 09, 10). With several brackets the last one counts fastest, as in
`scontrol show hostnames`.
"""

from __future__ import annotations

import itertools
import re

_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)-(\d+)")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_HOSTS_MAX = 1_000_000  # a typing error in a range must not fill the memory


def expand_hostlist(text: str) -> tuple[str, ...]:
    """The names that a Slurm hostlist stands for, in its own order."""
    hosts: list[str] = []
    for part in _split_outside_brackets(text):
        hosts.extend(_expand_name(part, text))
    if not hosts:
        raise ValueError(f"hostlist {text!r} names no host")
    return tuple(hosts)


def expand_task_counts(text: str) -> tuple[int, ...]:
    """Tasks per node, as in SLURM_STEP_TASKS_PER_NODE: "2(x3),1" is (2, 2, 2, 1)."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"task counts {text!r}: {part!r} is not a number like 4 or 4(x2)")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return tuple(counts)


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth = [""], 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise ValueError(f"hostlist {text!r}: its brackets do not match")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    if depth:
        raise ValueError(f"hostlist {text!r}: its brackets do not match")
    return [part.strip() for part in parts if part.strip()]


def _expand_name(name: str, text: str) -> list[str]:
    pieces = _BRACKET.split(name)  # fixed, bracket, fixed, bracket, ..., fixed
    choices = [_expand_numbers(piece, text) if i % 2 else [piece] for i, piece in enumerate(pieces)]
    total = 1
    for choice in choices:
        total *= len(choice)
    if total > _HOSTS_MAX:
        raise ValueError(f"hostlist {text!r} names {total} hosts, more than {_HOSTS_MAX}")
    return ["".join(combination) for combination in itertools.product(*choices)]


def _expand_numbers(numbers: str, text: str) -> list[str]:
    names: list[str] = []
    for item in numbers.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            if not item.strip().isalnum():
                raise ValueError(f"hostlist {text!r}: [{numbers}] is not a list of numbers")
            names.append(item.strip())
            continue
        first, last = int(match[1]), int(match[2])
        if not first <= last < first + _HOSTS_MAX:
            raise ValueError(f"hostlist {text!r}: range {item} runs backwards or is too long")
        names.extend(str(n).zfill(len(match[1])) for n in range(first, last + 1))
    return names
