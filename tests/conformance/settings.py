"""What one run of the harness is to do, as plain values.

The runner hands a Settings to its worker process through one environment variable, for that is
the only way which also reaches the ranks that a test starts with `spawn`. This module knows nothing
of torch.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

_VARIABLE = "CLOSERANKS_CONFORMANCE"


@dataclass(frozen=True)
class Settings:
    """One run of the harness."""

    ddp: str = ""  # the class under test as "module:Class"; empty is torch's own
    broken: str = ""  # break that class first, in the way that has this name in broken.py
    backend: str = ""  # of the groups that torch's tests make with gloo; empty is gloo
    force_cpu: bool = False  # run the tests for GPUs too, on the CPU
    start: str = "fork"  # how a test starts its ranks: "fork", or "spawn" as torch does
    world_size: int = 2
    timeout_s: float = 240.0  # for one test
    deadline_s: float = 1800.0  # for the whole run
    filter: str = ""  # regular expression to be found in a test's name
    only: tuple[str, ...] = ()  # and among these; empty is all
    done: tuple[str, ...] = ()  # already reported, not to be run again
    scratch: str = ""  # folder of one worker; everything below it is removed afterwards

    @property
    def differs_by_promise(self) -> bool:
        """Whether promised.py holds: torch's own class promised nothing."""
        return bool(self.ddp)

    def selects(self, test: str) -> bool:
        wanted = not self.only or test in self.only
        return wanted and re.search(self.filter, test) is not None

    def in_scratch(self, name: str) -> Path:
        return Path(self.scratch) / name

    def environment(self) -> dict[str, str]:
        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Settings:
        values = json.loads(os.environ[_VARIABLE])
        values["only"] = tuple(values["only"])
        values["done"] = tuple(values["done"])
        return cls(**values)
