"""The wire formats by name: what a user may ask for, and what that means. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

RANK_MAX = 64
EXACT = "exact"
AUTO = "auto"
POSSIBLE = f"bf16, fp16, int8, powersgd:RANK with RANK in 1..{RANK_MAX}, auto, exact"


@dataclass(frozen=True)
class Format:
    """A format, or a way to find one ("auto", "exact")."""

    name: str
    rank: int = 0  # of PowerSGD's matrices

    def __str__(self) -> str:
        return f"{self.name}:{self.rank}" if self.rank else self.name

    @property
    def is_exact(self) -> bool:
        """Whether it never changes a bit, now or later."""
        return self.name == EXACT


def parse(text: str) -> Format:
    """The format of a name; raises ValueError that tells what there is."""
    if text in ("bf16", "fp16", "int8", AUTO, EXACT):
        return Format(text)
    match = re.fullmatch(r"powersgd:(\d{1,4})", text)
    if match and 1 <= int(match[1]) <= RANK_MAX:
        return Format("powersgd", int(match[1]))
    raise ValueError(f"{text!r} is no wire format; there are {POSSIBLE}")
