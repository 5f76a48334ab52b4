"""One sentence about all that was measured. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from closeranks.bench.allreduce import Result as AllReduce
from closeranks.bench.allreduce import size_name
from closeranks.bench.findings import Result, best
from closeranks.bench.raw import OURS, TITLES


def verdict(found: Sequence[AllReduce], steps: Sequence[Result]) -> str:
    """What a user of this machine gains or loses, in medians over rounds."""
    clauses = []
    if found:
        largest = max(found, key=lambda result: result.size_bytes)
        name = min((n for n in OURS.values() if n in largest.ms), key=lambda n: best(largest.ms[n]))
        clauses.append(
            f"{largest.ranks} ranks all-reduce {size_name(largest.size_bytes)} "
            f"{largest.ratio_median(name):.1f} times as fast as with gloo, at "
            f"{largest.of_limit(name):.0%} of what memory allows"
        )
    if steps:
        shown = ", ".join(
            f"{result.comparisons['ours'].ratio_median:.2f} ({TITLES[result.case]})"
            for result in steps
        )
        clauses.append(f"a step takes these parts of torch DDP's time: {shown}")
    return f"On this machine {', and '.join(clauses)}."
