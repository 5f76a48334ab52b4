"""How far a job has come, as one value and as one line of text or one bar.

Rates are over all ranks that told; the slowest rank is the one that waits least for others in
exchanges of closeranks, and is named only where the others wait noticeably longer. Colours and the
bar itself are rich's, which is loaded when there is a bar to draw.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from closeranks.observe.pace import WINDOW_S, Pace, amount, duration

_BAR_WIDTH_MAX = 40
_NOTICEABLE = 0.1  # of the time


@dataclass(frozen=True)
class Standing:
    """A moment of a loop."""

    step: int
    total: int | None
    elapsed_s: float
    steps_per_s: float
    samples_per_s: float
    values: Mapping[str, str] = field(default_factory=dict)
    slowest: int | None = None
    is_done: bool = False

    def parts(self) -> list[str]:
        """What is said after the bar."""
        steps_per_s = self.steps_per_s
        if self.is_done and self.elapsed_s:
            steps_per_s = self.step / self.elapsed_s
        found = [f"{amount(steps_per_s)} steps/s"]
        if self.samples_per_s:
            found.append(f"{amount(self.samples_per_s)} samples/s")
        if self.is_done:
            found.append(f"in {duration(self.elapsed_s)}")
        elif self.total is not None and self.steps_per_s:
            found.append(f"eta {duration((self.total - self.step) / self.steps_per_s)}")
        found += [f"{name} {value}" for name, value in self.values.items()]
        if self.slowest is not None:
            found.append(f"rank {self.slowest} is slowest")
        return found

    def line(self) -> str:
        of_total = f"/{self.total}" if self.total is not None else ""
        percent = f" ({self.step / self.total:.0%})" if self.total else ""
        return ", ".join([f"step {self.step}{of_total}{percent}", *self.parts()])

    def bar(self, width: int) -> str:
        """One line for a terminal that is so wide, never wrapped."""
        from rich.console import Console
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        of_total = f"/{self.total}" if self.total is not None else ""
        text = Text("  ".join([f"{self.step}{of_total}", *self.parts()]), no_wrap=True)
        grid = Table.grid(padding=(0, 1))
        bar_width = max(0, min(_BAR_WIDTH_MAX, width - len(text) - 2))
        if self.total and bar_width > 4:
            bar = ProgressBar(total=self.total, completed=self.step, width=bar_width)
            grid.add_row(bar, text)
        else:
            grid.add_row(text)
        shown = io.StringIO()
        console = Console(file=shown, width=width, force_terminal=True, legacy_windows=False)
        console.print(grid, end="", overflow="crop", no_wrap=True)
        return shown.getvalue().split("\n")[0]


class Standings:
    """What all ranks of a host have told, put together. The newest loop of rank 0 is the one."""

    def __init__(self, leader: int = 0) -> None:
        self._leader = leader
        self._told: dict[int, dict[str, Any]] = {}
        self._steps, self._samples = Pace(), dict[int, Pace]()
        self._samples_of_loop: dict[int, Pace] = {}
        self._loop: object = None

    def tell(self, rank: int, told: Mapping[str, Any]) -> bool:
        """Take what a rank says; whether it was the leader, so that there is something new."""
        if rank == self._leader and told["loop"] != self._loop:
            self._loop, self._steps = told["loop"], Pace()
            self._samples.clear()  # What lies between two loops is no part of either.
            self._samples_of_loop.clear()
        self._told[rank] = dict(told)
        for paces, window_s in ((self._samples, WINDOW_S), (self._samples_of_loop, math.inf)):
            paces.setdefault(rank, Pace(window_s)).note(told["at_s"], told["samples_ever"])
        if rank == self._leader:
            self._steps.note(told["at_s"], told["step"])
        return rank == self._leader

    def standing(self) -> Standing:
        told = self._told[self._leader]
        paces = self._samples_of_loop if told["is_done"] else self._samples
        return Standing(
            step=told["step"],
            total=told["total"],
            elapsed_s=told["at_s"] - told["began_s"],
            steps_per_s=self._steps.rate,
            samples_per_s=sum(pace.rate for pace in paces.values()),
            values=told["values"],
            slowest=self._slowest(),
            is_done=told["is_done"],
        )

    def _slowest(self) -> int | None:
        waited = {rank: told["waited"] for rank, told in self._told.items()}
        if len(waited) < 2 or not any(waited.values()):
            return None
        slowest = min(waited, key=lambda rank: waited[rank])
        others = [share for rank, share in waited.items() if rank != slowest]
        return slowest if min(others) - waited[slowest] > _NOTICEABLE else None
