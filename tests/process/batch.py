"""Runs the scenarios of a test file one after the other in one process group.

A group start costs half a second, a scenario a few milliseconds, so that the scenarios of a file
share a group. The verdicts stay separate:

1. Every rank runs the scenarios in order, with a barrier after each, up to its first failure.
2. The earliest scenario at which any rank stopped failed; all before it passed.
3. Those after it are run again in a new group.

Scenarios are functions of (rank, world) at the top level of their module. This file knows nothing
of what they test.
"""

from __future__ import annotations

import shutil
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.ranks import try_ranks

Scenario = Callable[[int, int], None]
WORLDS = (2, 3)


class Batch:
    """The scenarios of one file, and for each world size what became of them so far."""

    def __init__(
        self, *, group_timeout_s: float = 15.0, deadline_s: float = 100.0, **options: Any
    ) -> None:
        self._scenarios: dict[str, Scenario] = {}
        self._verdicts: dict[int, dict[str, str | None]] = {}
        self._group_timeout_s = group_timeout_s
        self._deadline_s = deadline_s
        self._options = options  # of try_ranks

    def add(self, scenario: Scenario) -> Scenario:
        """Register a scenario under the name of its function; a decorator."""
        assert scenario.__name__ not in self._scenarios, "two scenarios of one name"
        self._scenarios[scenario.__name__] = scenario
        return scenario

    def names(self) -> list[str]:
        return list(self._scenarios)

    def check(self, name: str, world: int) -> None:
        """Fail with the tracebacks of the ranks if the scenario failed at this world size."""
        verdicts = self._verdicts.setdefault(world, {})
        while name not in verdicts:
            self._run_remaining(world, verdicts)
        failure = verdicts[name]
        assert failure is None, failure

    def _run_remaining(self, world: int, verdicts: dict[str, str | None]) -> None:
        names = [name for name in self._scenarios if name not in verdicts]
        # Phase 1
        progress = Path(tempfile.mkdtemp(prefix="closeranks-batch-"))
        failures: list[tuple[int, str]] = []
        try:
            outcomes = try_ranks(
                world,
                _run_in_order,
                world,
                [self._scenarios[name] for name in names],
                str(progress),
                group_timeout_s=self._group_timeout_s,
                deadline_s=self._deadline_s,
                **self._options,
            )
            for outcome in outcomes:
                if outcome.failed:  # it died, or its failure could not be sent
                    reached = _reached(progress, outcome.rank)
                    failures.append((reached, f"rank {outcome.rank} died\n{outcome.trace}"))
                elif outcome.value is not None:
                    failures.append(outcome.value)
        except AssertionError as hang:
            failures.append((min(_reached(progress, rank) for rank in range(world)), str(hang)))
        finally:
            shutil.rmtree(progress, ignore_errors=True)
        # Phase 2
        stopped = min((index for index, _ in failures), default=len(names))
        for passed in names[:stopped]:
            verdicts[passed] = None
        if failures:
            texts = [text for index, text in failures if index == stopped]
            verdicts[names[stopped]] = f"{names[stopped]} failed\n" + "\n".join(texts)
        # Phase 3 is the next call.


def _run_in_order(
    rank: int, world: int, scenarios: list[Scenario], progress: str
) -> tuple[int, str] | None:
    """Run scenarios up to the first that fails here; return its index and traceback."""
    for index, scenario in enumerate(scenarios):
        (Path(progress) / str(rank)).write_text(str(index))
        try:
            scenario(rank, world)
            dist.barrier()
        except BaseException:  # noqa: BLE001 - whatever it was is the verdict
            return index, f"--- rank {rank} ---\n{traceback.format_exc()}"
    return None


def _reached(progress: Path, rank: int) -> int:
    file = progress / str(rank)
    return int(file.read_text()) if file.exists() else 0
