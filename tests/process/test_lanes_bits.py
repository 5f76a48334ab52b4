"""Whatever the number of workers, the bits at the end are those of the plain loop.

Every script has a last batch that is smaller and an evaluation in between or at the end. Here with
1, 2, 3 and 5 workers; tests/chaos has the rest of the matrix.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.lanes_scripts import SCRIPTS, made
from tests.workers import run_job


@functools.cache
def plain(name: str) -> dict[str, Any]:
    """What the script says with the plain loop of lanes/naive.py."""
    value: dict[str, Any] = run_job(1, by_plain_loop, name).values[0]
    return value


def by_plain_loop(name: str) -> dict[str, Any]:
    value = SCRIPTS[name](True)
    return value | {"printed": made[-1].printed}


def with_loaders(**options: Any) -> dict[str, Any]:
    return SCRIPTS["augmented"](num_workers=2, **options)


def is_plain(name: str, workers: int, script: Any = None, deadline_s: float = 60.0) -> None:
    job = run_job(workers, script or SCRIPTS[name], deadline_s=deadline_s)
    assert job.ended is None, job
    assert job.digest == plain(name)["digest"], f"{workers} workers"
    assert job.values, job  # Of whoever was not overtaken at the very end.
    for value in job.values:
        assert value | {"rank": 0, "printed": job.printed} == plain(name)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_digest_does_not_depend_on_the_number_of_workers(name: str) -> None:
    for workers in (1, 2, 3, 5):
        is_plain(name, workers)


def test_nor_does_it_depend_on_loaders() -> None:
    is_plain("augmented", 2, with_loaders)
