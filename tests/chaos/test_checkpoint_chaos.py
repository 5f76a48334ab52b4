"""Jobs that are killed as a whole, again and again, at any moment: the end has the same bits."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.lanes_scripts import SCRIPTS
from tests.process.test_checkpoint_faults import whole
from tests.process.test_checkpoint_resume import (
    checkpointed,
    killed_at_random_moments,
    story,
    undisturbed,
)
from tests.workers import run_job


@pytest.mark.parametrize("seed", range(12))
def test_a_story_is_killed_until_it_ends(seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"{seed}/{time.time_ns()}")
    job = killed_at_random_moments(12, rng, story, str(tmp_path), "", rng.randint(1, 5))
    assert job.digest == undisturbed().digest
    assert job.values[0]["losses"] == undisturbed().values[0]["losses"]
    assert whole(tmp_path)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_is_killed_until_it_ends(name: str, tmp_path: Path) -> None:
    rng = random.Random(f"{name}/{time.time_ns()}")
    job = killed_at_random_moments(12, rng, checkpointed, name, str(tmp_path))
    assert job.digest == run_job(1, SCRIPTS[name], True).digest
    assert whole(tmp_path)


@pytest.mark.parametrize("seed", range(6))
def test_workers_and_jobs_are_killed(seed: int, tmp_path: Path) -> None:
    """Deaths of all workers of a job that starts them again, and of the job."""
    rng = random.Random(f"{seed}/{time.time_ns()}")
    for _ in range(4):
        at_s = rng.uniform(0.1, 1.5)
        job = run_job(rng.randint(1, 4), story, str(tmp_path), "", kill_all_after_s=at_s)
        assert job.ended is None and job.digest == undisturbed().digest
        if rng.random() < 0.5:
            for path in tmp_path.glob("step-*"):
                if rng.random() < 0.5:
                    (path / "manifest.json").unlink(missing_ok=True)
