"""What a measurement looks like: tables for people, JSON for others, a folder to keep.

Shows what was found; must not decide anything.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import keeping
from memory import Memory
from rich.console import RenderableType
from rich.table import Table

from closeranks.bench import tables
from closeranks.bench.findings import Result, verdict
from closeranks.bench.raw import PAIRS, TITLES

_TEXTS = ("case", "variant", "view")
_DIFFERENCE_MAX = 1e-5
_OVERLAP_LEGEND = """\
Medians over the steps of all ranks. inside: while gradients were still being computed.
"""
_MEMORY_LEGEND = """\
at rest: after a backward. peak: within a step, activations included. The largest of all ranks.
"""


@dataclasses.dataclass
class Report:
    """Everything that one run of a measurement has to say."""

    command: str
    environment: dict[str, str]
    cores: int
    load_before: float
    rounds: int
    results: list[Result]
    memory: dict[str, list[Memory]]  # by variant, one for each rank

    def parts(self) -> list[RenderableType]:
        """From top to bottom, for a console."""
        parts: list[RenderableType] = []
        if self.results:
            parts += [tables.step_table(self.results, self.rounds), tables.STEP_LEGEND]
            parts += [overlap_table(self.results), _OVERLAP_LEGEND]
        if self.memory:
            parts += [memory_table(self.memory), _MEMORY_LEGEND]
        if self.results:
            parts.append(verdict(self.results, TITLES))
        for result in self.results:
            if result.difference > _DIFFERENCE_MAX:
                parts.append(
                    f"{result.case} on {result.ranks} ranks: ours and torch's differ "
                    f"by {result.difference:.1g} of the largest weight: not the same work."
                )
        if self.load_before > self.cores:
            parts.append(
                f"The machine was busy before it began (load {self.load_before:.1f} on "
                f"{self.cores} cores): trust none of these times, and the ratios a little."
            )
        return parts

    def write_json(self, path: Path) -> None:
        keeping.write_json(path, dataclasses.asdict(self))

    def keep(self, name: str) -> Path:
        """Write a dated folder with command, environment, commit and raw numbers."""
        text = tables.as_text(self.parts())
        return keeping.keep(name, self.command, self.environment, text, dataclasses.asdict(self))


def overlap_table(results: list[Result]) -> Table:
    shown = tables.table(
        "Exchange of closeranks inside the backward (traced, not timed)",
        (
            "case",
            "ranks",
            "view",
            "buckets",
            "ended inside",
            "exchange ms",
            "share inside",
        ),
        left=_TEXTS,
    )
    for result in results:
        for as_view, _, ours in PAIRS:
            found = result.overlaps[ours]
            shown.add_row(
                "" if as_view else TITLES[result.case],
                "" if as_view else str(result.ranks),
                "yes" if as_view else "no",
                str(found.buckets),
                f"{found.ended_inside:g}",
                f"{found.exchange_ms:.1f}",
                f"{found.share_inside:.0%}",
                end_section=as_view,
            )
    return shown


def memory_table(memory: dict[str, list[Memory]]) -> Table:
    gradients = next(iter(memory.values()))[0].gradients
    shown = tables.table(
        f"Growth of a rank's resident memory in MB, for {gradients:.0f} MB of gradients",
        ("variant", "at rest", "x gradients", "peak"),
        left=_TEXTS,
    )
    for name, of_ranks in memory.items():
        at_rest = max(rank.at_rest for rank in of_ranks)
        peaks = [rank.peak for rank in of_ranks if rank.peak is not None]
        shown.add_row(
            name,
            f"{at_rest:.1f}",
            f"{at_rest / gradients:.2f}",
            f"{max(peaks):.1f}" if peaks else "not known",
        )
    return shown
