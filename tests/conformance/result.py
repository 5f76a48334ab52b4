"""How one of torch's tests ended, and what a worker writes down for its runner.

A test ends in one of four ways:

    pass       as the test wants it, and the class under test was constructed at least once
    promised   as the test wants it, but for the difference that promised.py names
    fail       in any other way, also by a hang or a dead process
    skip       torch or the harness had a reason not to run it; the reason is kept
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

PASS, PROMISED, FAIL, SKIP = "pass", "promised", "fail", "skip"

_NOISE = re.compile(r"^(raise |File |self\.|~|\^)|exited with error code")


@dataclass(frozen=True)
class Result:
    test: str  # "Class.method"
    status: str
    why: str = ""
    seconds: float = 0.0
    built: int = 0  # objects of the class under test, over all ranks

    @property
    def headline(self) -> str:
        """The one line of `why` that tells most."""
        lines = [line.strip() for line in self.why.splitlines() if line.strip()]
        telling = [line for line in lines if "Error" in line and not _NOISE.search(line)]
        return (telling or lines[-1:] or [""])[0][:160]


@dataclass(frozen=True)
class Message:
    """One line from worker to runner; exactly one of the three is set."""

    selected: list[str] | None = None  # first: all tests that will be run, in order
    running: str | None = None  # before each test
    result: Result | None = field(default=None)  # after each test

    def encode(self) -> str:
        return json.dumps({k: v for k, v in asdict(self).items() if v is not None}) + "\n"

    @classmethod
    def decode(cls, line: str) -> Message:
        values: dict[str, Any] = json.loads(line)
        if "result" in values:
            values["result"] = Result(**values["result"])
        return cls(**values)
