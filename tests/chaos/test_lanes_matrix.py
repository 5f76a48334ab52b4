"""All scripts with 1 to 8 workers, more than there are cores, and other numbers of lanes."""

from __future__ import annotations

import functools

import pytest

from tests.lanes_scripts import SCRIPTS
from tests.process.test_lanes_bits import is_plain, with_loaders
from tests.workers import run_job


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_digest_is_that_of_the_plain_loop(name: str, workers: int) -> None:
    is_plain(name, workers, deadline_s=150.0)


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_with_loaders(workers: int) -> None:
    is_plain("augmented", workers, with_loaders, deadline_s=150.0)


@pytest.mark.parametrize("lanes", [1, 3, 5, 6, 13])
@pytest.mark.parametrize("name", ["mlp", "gan"])
def test_other_numbers_of_lanes(name: str, lanes: int) -> None:
    script = functools.partial(SCRIPTS[name], lanes=lanes)
    digests = {
        run_job(1, functools.partial(script, True)).digest,
        *(run_job(workers, script).digest for workers in (1, 2, 4)),
    }
    assert len(digests) == 1, f"{lanes} lanes: {digests}"
