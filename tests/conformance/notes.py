"""What the ranks of a running test tell the worker: one line each in a shared file.

Ranks only append, in writes short enough to be atomic; the worker empties the file before each
test and reads it afterwards.
"""

from __future__ import annotations

from collections import Counter

from tests.conformance.settings import Settings

CONSTRUCTED = "constructed"  # an object of the class under test was made
TOLERATED = "tolerated"  # a promised difference showed itself

_FILE = "notes"


def add(settings: Settings, note: str) -> None:
    with settings.in_scratch(_FILE).open("a") as file:
        file.write(note + "\n")


def clear(settings: Settings) -> None:
    settings.in_scratch(_FILE).write_text("")


def count(settings: Settings) -> Counter[str]:
    return Counter(settings.in_scratch(_FILE).read_text().split())
