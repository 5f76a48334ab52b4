"""Whatever the number of workers, the bits at the end are those of the plain loop."""

from __future__ import annotations

import pytest

from tests.lanes_scripts import SCRIPTS
from tests.workers import run_job


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_digest_does_not_depend_on_the_number_of_workers(name: str) -> None:
    naive = run_job(1, SCRIPTS[name], True)
    for workers in (1, 2, 3, 4):
        job = run_job(workers, SCRIPTS[name])
        assert job.digest == naive.digest, f"{workers} workers"
        assert job.values, job  # Of whoever was not overtaken at the very end.
        for value in job.values:
            assert value | {"rank": 0} == naive.values[0]
