"""What was found, as tables of a hundred columns and the sentences that explain them.

Shows; must not decide anything.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from closeranks.bench import raw
from closeranks.bench.allreduce import Result as AllReduce
from closeranks.bench.allreduce import size_name
from closeranks.bench.findings import Comparison, Result, best, median
from closeranks.bench.raw import PAIRS, TITLES

WIDTH = 100
_ALLREDUCE_LEGEND = """\
ms: best/median over all rounds, slowest rank. x gloo: first of the best, then the median of the
ratios within each round; above 1 is faster. of limit: the in-place limit over the best time. cpu:
ms of processor time for one all-reduce, all threads of the busiest rank (MPI's own not known).
*: ranks share cores; otherwise each is pinned to its own.
"""
STEP_LEGEND = """\
ratio, fwd+bwd, cpu: ours to torch's, below 1 is less; first of the best steps, then the median of
the ratios within each round. cpu: processor time of all threads, first of the best block. load: the
average before and after. *: ranks share cores; otherwise each is pinned to its own.
"""


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


def allreduce_parts(found: Sequence[AllReduce], rounds: int) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for result in found:
        ranks = f"{result.ranks}{'' if result.pinned else '*'} ranks"
        load = f"load {result.loads[0]:.1f} -> {result.loads[1]:.1f}"
        shown = table(
            f"{size_name(result.size_bytes)}, {ranks}, {rounds} rounds, {load}",
            ("way", "ms", "x gloo", "of limit", "cpu"),
            left=("way",),
        )
        for name in sorted(result.ms, key=lambda n: best(result.ms[n])):
            times = f"{_short(best(result.ms[name]))}/{_short(median(result.ms[name]))}"
            ratios = f"{result.ratio_best(name):.1f} {result.ratio_median(name):.1f}"
            is_limit = name in raw.LIMITS
            shown.add_row(
                name,
                times,
                "" if is_limit else ratios,
                "" if is_limit else f"{result.of_limit(name):.0%}",
                "" if name == raw.MPI else _short(result.cpu_ms[name]),
            )
        parts += [shown, ""]
    return [*parts, _ALLREDUCE_LEGEND]


def step_table(results: Sequence[Result], rounds: int) -> Table:
    shown = table(
        f"Step time in ms, best/median of {rounds} rounds",
        ("case", "ranks", "view", "no sync", "torch", "ours", "ratio", "fwd+bwd", "cpu"),
        left=("case", "variant", "view"),
    )
    for result in results:
        load = f"  load {result.load_before:.1f} -> {result.load_after:.1f}"
        for as_view, theirs, ours in PAIRS:
            shown.add_row(
                load if as_view else TITLES[result.case],
                "" if as_view else f"{result.ranks}{'' if result.pinned else '*'}",
                "yes" if as_view else "no",
                "" if as_view else _times(result, "no sync"),
                _times(result, theirs),
                _times(result, ours),
                _ratios(result.comparisons[ours]),
                _ratios(result.backward_comparisons[ours]),
                _ratios(result.cpu_comparisons[ours]),
                end_section=as_view,
            )
    return shown


def _times(result: Result, variant: str) -> str:
    rounds = result.step_ms[variant]
    return "/".join(
        f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" for ms in (best(rounds), median(rounds))
    )


def _ratios(comparison: Comparison) -> str:
    return f"{comparison.ratio_best:.2f} {comparison.ratio_median:.2f}"


def _short(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.2f}" if ms >= 1 else f"{ms:.4f}"
