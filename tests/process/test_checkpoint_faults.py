"""Whatever happens while a checkpoint is written, training goes on and old ones stay whole."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from closeranks.checkpoint.folder import Folder
from closeranks.checkpoint.reader import verify
from closeranks.lanes.ranks import Ranks
from tests.process.test_checkpoint_resume import killed, story, undisturbed, warnings_of
from tests.workers import FULL, STOP, Fault, run_job

POINTS = [
    "checkpoint begun",
    "checkpoint file half written",
    "checkpoint not named",
    "checkpoint named",
]


def whole(folder: Path) -> list[str]:
    """The checkpoints, all of which are whole, with nothing else beside them."""
    found = Folder(folder).checkpoints()
    for path in found:
        verify(path)
    others = set(os.listdir(folder)) - {path.name for path in found}
    assert others <= {"lock", "finished.json"}, others
    return [path.name for path in found]


def and_again(folder: Path, workers: int = 2) -> None:
    """The job has ended, and its end is durable: run again it trains nothing."""
    again = run_job(workers, story, str(folder), "", faults=[Fault("before forward")])
    assert not again.fired, again
    assert again.digest == undisturbed().digest
    assert again.printed == undisturbed().printed


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("point", POINTS)
def test_the_writer_is_killed(point: str, workers: int, tmp_path: Path) -> None:
    job = run_job(workers, story, str(tmp_path), "", faults=[Fault(point, count=2)])
    assert job.fired and job.restarts >= 1 and job.ended is None
    assert job.digest == undisturbed().digest
    assert whole(tmp_path)
    and_again(tmp_path)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("point", POINTS[:3])
def test_the_disk_is_full(point: str, workers: int, tmp_path: Path) -> None:
    job = run_job(workers, story, str(tmp_path), "", faults=[Fault(point, FULL, count=2)])
    assert job.fired and not job.restarts and job.ended is None
    assert job.digest == undisturbed().digest
    (note,) = warnings_of(job)
    assert "No space left on device" in note and "Training goes on" in note
    assert whole(tmp_path)
    and_again(tmp_path)


@pytest.mark.parametrize("point", POINTS)
def test_the_writer_is_stopped_for_ever(point: str, tmp_path: Path) -> None:
    """The other one writes later checkpoints, and the last."""
    faults = [Fault(point, STOP, incarnation=1)]
    job = run_job(2, story, str(tmp_path), "", faults=faults)
    assert job.fired and job.digest == undisturbed().digest
    names = [name for name in whole_but_unfinished(tmp_path) if "call-6" in name]
    assert names, os.listdir(tmp_path)
    and_again(tmp_path)


def whole_but_unfinished(folder: Path) -> list[str]:
    found = Folder(folder).checkpoints()
    for path in found:
        verify(path)
    return [path.name for path in found]


LAST = {"checkpoint": "step-00000028-call-6"}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("point", [POINTS[0], POINTS[2], POINTS[3]])
def test_the_writer_of_the_last_one_is_killed(point: str, workers: int, tmp_path: Path) -> None:
    job = run_job(workers, story, str(tmp_path), "", faults=[Fault(point, facts=LAST)])
    assert job.fired and job.digest == undisturbed().digest
    assert whole(tmp_path)[0] == LAST["checkpoint"]
    and_again(tmp_path)


def test_the_newest_is_damaged(tmp_path: Path) -> None:
    moment = Fault("boundary", facts={"call": 4, "number": 7})
    killed(2, moment, story, str(tmp_path), "", 4, True)
    before = whole(tmp_path)
    with open(tmp_path / before[0] / "rest.safetensors", "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"altered!")
    job = run_job(2, story, str(tmp_path), "")
    assert job.digest == undisturbed().digest
    first, second = warnings_of(job)
    assert before[0] in first and "rest.safetensors was altered" in first
    assert f"going on from {before[1]}" in second
    and_again(tmp_path)


# What may not go on.


def other(folder: str, what: str) -> dict[str, Any]:
    """A script whose training is another one."""
    options: dict[str, Any] = {"lanes": {"lanes": 4}, "seed": {"seed": 7}}.get(what, {})
    if what == "conditions":
        torch.__version__ = torch.torch_version.TorchVersion("0.0.1")
        options = {"threads": 2}
    if what == "prepared":
        ranks = Ranks(checkpoint=folder)
        model = nn.Linear(2, 2)
        ranks.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        ranks.once(lambda: None)
        for _ in ranks.steps(torch.utils.data.TensorDataset(torch.zeros(4, 2)), 4):
            raise AssertionError("it trains")
    return story(folder, "", **options)


@pytest.mark.parametrize(
    ("what", "says"),
    [("lanes", "lanes=8.*lanes=4"), ("seed", "seed=0.*seed=7"), ("prepared", "1:SGD.*1:AdamW")],
)
def test_another_training_is_refused(what: str, says: str, tmp_path: Path) -> None:
    killed(2, Fault("boundary", facts={"call": 2, "number": 5}), story, str(tmp_path), "")
    job = run_job(2, other, str(tmp_path), what)
    assert not job.values and job.ended is not None
    assert "CheckpointMismatch" in job.ended
    assert re.search(says, job.ended) and "Nothing was" in job.ended


def test_other_conditions_are_warned_about_by_name(tmp_path: Path) -> None:
    killed(2, Fault("boundary", facts={"call": 2, "number": 5}), story, str(tmp_path), "")
    job = run_job(2, other, str(tmp_path), "conditions")
    (note,) = warnings_of(job)
    assert "now 0.0.1" in note and "threads of a worker: 1, now 2" in note
    assert job.digest


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from tests.process.test_checkpoint_resume import story
told = story(sys.argv[1], "")
print(told["digest"])
"""


def script(folder: Path) -> subprocess.CompletedProcess[str]:
    """The story as a plain script."""
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(root=root), str(folder)],
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_a_second_job_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    mine = Folder(tmp_path)
    mine.lock("a job", f"process {os.getpid()}")
    try:
        done = script(tmp_path)
    finally:
        mine.unlock()
    assert done.returncode == 1
    assert f"process {os.getpid()} on host {os.uname().nodename}" in done.stderr
    assert "CheckpointInUse" in done.stderr and "Nothing was trained" in done.stderr


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 48 KB, which holds a checkpoint or two of the story and no more."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        _mount("-t", "tmpfs", "-o", "size=48k", "none", str(folder))
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root may mount a tiny disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True, timeout=30)


def test_a_disk_that_is_really_full(tiny_disk: Path) -> None:
    job = run_job(2, story, str(tiny_disk), "")
    assert job.ended is None and job.digest == undisturbed().digest
    notes = warnings_of(job)
    assert notes and all("No space left on device" in note for note in notes)
    found = whole(tiny_disk)
    assert found and LAST["checkpoint"] not in found
    _mount("-o", "remount,size=4m", str(tiny_disk))
    again = run_job(2, story, str(tiny_disk), "")
    assert again.digest == undisturbed().digest and not warnings_of(again)
    assert whole(tiny_disk)[0] == LAST["checkpoint"]


def test_a_plain_script_is_a_job_of_one(tmp_path: Path) -> None:
    killed(2, Fault("boundary", facts={"call": 2, "number": 5}), story, str(tmp_path), "")
    done = script(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == undisturbed().digest
    assert json.loads((tmp_path / "finished.json").read_text())
    again = script(tmp_path)
    assert again.stdout.splitlines()[:-1] == undisturbed().printed


def loading(folder: str) -> dict[str, Any]:
    """A plain script that wants the model only."""
    ranks = Ranks(seed=99)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 3))
    ranks.prepare(model)
    steps = ranks.load(folder)
    weights = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return {"steps": steps, "losses": len(ranks.state["losses"]), "weights": weights}


def test_a_plain_script_loads_a_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run_job(2, story, str(tmp_path), "")
    (newest,) = run_job(1, loading, str(tmp_path)).values
    path = tmp_path / "step-00000028-call-6"
    weights = load_file(path / "0-Sequential.safetensors")
    assert newest["weights"] == {name: tensor.tolist() for name, tensor in weights.items()}
    assert newest["steps"] == newest["losses"] == 28
    older = Folder(tmp_path).checkpoints()[-1]
    (found,) = run_job(1, loading, str(older)).values
    assert found["steps"] == found["losses"] < 28
    missing = run_job(1, loading, str(tmp_path / "nothing"))
    assert missing.ended is not None and "CheckpointDamaged" in missing.ended


def looped(folder: str, samples: int, batch_size: int, epochs: int) -> dict[str, Any]:
    ranks = Ranks(checkpoint=folder, every=3)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ranks.prepare(model, optimizer)
    data = torch.utils.data.TensorDataset(torch.arange(2.0 * samples).view(-1, 2) / 100)
    steps = 0
    for step in ranks.steps(data, batch_size, epochs=epochs):
        for (x,) in step:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    ranks.once(lambda: None)
    return {"digest": ranks.digest(), "steps": steps}


@pytest.mark.parametrize(("samples", "size", "says"), [(40, 16, "samples 48"), (48, 8, "size 16")])
def test_another_dataset_is_refused(samples: int, size: int, says: str, tmp_path: Path) -> None:
    moment = Fault("checkpoint named")  # after three steps
    killed(2, moment, looped, str(tmp_path), 48, 16, 2)
    job = run_job(2, looped, str(tmp_path), samples, size, 2)
    assert job.ended is not None and "CheckpointMismatch" in job.ended
    assert f"was begun with {says.replace('size', 'batch_size')}" in job.ended


def test_more_epochs_go_on_and_after_the_end_are_warned_about(tmp_path: Path) -> None:
    moment = Fault("checkpoint named")  # after three steps
    killed(2, moment, looped, str(tmp_path / "a"), 48, 16, 2)
    longer = run_job(1, looped, str(tmp_path / "a"), 48, 16, 4)
    whole_run = run_job(1, looped, str(tmp_path / "b"), 48, 16, 4)
    assert longer.digest == whole_run.digest and not warnings_of(longer)
    assert longer.values[0]["steps"] == 9 and whole_run.values[0]["steps"] == 12
    again = run_job(1, looped, str(tmp_path / "b"), 48, 16, 5)
    (note,) = warnings_of(again)
    assert "complete after 4 epochs" in note and again.values[0]["steps"] == 0
