"""What lies in a folder of checkpoints: the newest whole one counts, and only one job writes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from closeranks.checkpoint import folder as folders
from closeranks.checkpoint import snapshot
from closeranks.checkpoint.folder import Folder, key_of, name_of
from closeranks.checkpoint.reader import read, verify
from closeranks.checkpoint.writer import write
from closeranks.errors import CheckpointDamaged, CheckpointInUse, CheckpointMismatch
from closeranks.lanes import resume
from closeranks.observe import points

WEIGHTS = {"a": torch.arange(1000.0), "b": torch.ones(3, dtype=torch.bool)}


def put(path: Path, steps: int, call: int = 0, keep: int = 3) -> Path:
    tree = {"weights": WEIGHTS, "steps": steps, "other": torch.full((2,), float(steps))}
    taken = snapshot.take(name_of((steps, call)), {"steps": steps}, tree, {"0-Net": WEIGHTS})
    return write(Folder(path), taken, "job-0", keep)


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def test_a_name_says_after_how_many_steps() -> None:
    assert name_of((128, 0)) == "step-00000128"
    assert name_of((128, 2)) == "step-00000128-call-2"
    for key in ((0, 0), (128, 2), (10**9, 12)):
        assert key_of(name_of(key)) == key
    assert key_of("step-12") is None and key_of(".step-00000128.job-0") is None


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    for steps in (1, 2, 3, 4):
        put(tmp_path, steps)
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]


def test_of_one_number_of_steps_the_newest_is_kept(tmp_path: Path) -> None:
    put(tmp_path, 1, keep=2)
    put(tmp_path, 2, keep=2)
    put(tmp_path, 2, 3, keep=2)
    assert names(tmp_path) == ["step-00000001", "step-00000002-call-3"]


def test_what_is_newer_than_the_one_just_written_does_not_count(tmp_path: Path) -> None:
    for steps in (7, 8, 9):
        put(tmp_path, steps)
    put(tmp_path, 3, keep=1)
    put(tmp_path, 4, keep=1)
    assert names(tmp_path) == ["step-00000004", *(f"step-0000000{k}" for k in (7, 8, 9))]


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink, lambda p: p.write_bytes(b"")])
@pytest.mark.parametrize(
    "file", ["manifest.json", "state.json", "0-Net.safetensors", "rest.safetensors"]
)
def test_a_damaged_one_is_passed_over(damage: Any, file: str, tmp_path: Path) -> None:
    put(tmp_path, 1)
    damage(put(tmp_path, 2) / file)
    with pytest.raises(CheckpointDamaged, match="step-00000002"):
        read(tmp_path / "step-00000002")
    told: list[str] = []
    found = resume.newest(Folder(tmp_path), told.append)
    assert found is not None and found.tree["steps"] == 1
    assert "step-00000002" in told[0] and file in told[0]
    assert "going on from step-00000001" in told[1]


def test_no_whole_one_is_said_and_is_the_start(tmp_path: Path) -> None:
    flip(put(tmp_path, 2) / "state.json")
    told: list[str] = []
    assert resume.newest(Folder(tmp_path), told.append) is None
    assert "begins at step 0" in told[-1]


def test_a_damaged_one_is_replaced_and_a_whole_one_is_left(tmp_path: Path) -> None:
    path = put(tmp_path, 2)
    inode = path.stat().st_ino
    assert put(tmp_path, 2).stat().st_ino == inode
    flip(path / "state.json")
    assert put(tmp_path, 2).stat().st_ino != inode
    verify(path)
    assert names(tmp_path) == ["step-00000002"]


def test_a_newer_format_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("closeranks.checkpoint.writer.FORMAT", 2)
    put(tmp_path, 1)
    with pytest.raises(CheckpointMismatch, match="format 2"):
        resume.newest(Folder(tmp_path), lambda text: None)


POINTS = [
    "checkpoint begun",
    "checkpoint file half written",
    "checkpoint not named",
]


@pytest.mark.parametrize("point", POINTS)
def test_a_full_disk_leaves_the_old_ones(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, 1)
    before = names(tmp_path)
    fired: list[str] = []

    def full(name: str, **facts: object) -> None:
        if name == point:
            fired.append(name)
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(points, "on_reach", full)
    with pytest.raises(OSError, match="No space"):
        put(tmp_path, 2)
    assert fired and names(tmp_path) == before


def test_files_and_folder_are_durable_before_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        done.append("sync " + Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        real_fsync(fd)

    def rename(source: Path, target: Path) -> None:
        done.append(f"name {target.name}")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    put(tmp_path, 1)
    files = ["0-Net.safetensors", "rest.safetensors", "state.json", "manifest.json"]
    temporary = ".step-00000001.job-0"
    assert done == [
        *(f"sync {name}" for name in files),
        *(f"sync {temporary}", "name step-00000001", f"sync {tmp_path.name}"),
    ]


def test_what_dead_jobs_have_left_is_removed(tmp_path: Path) -> None:
    put(tmp_path, 1)
    for owner in ("dead-0", "live-1"):
        (tmp_path / f".step-00000002.{owner}").mkdir()
        (tmp_path / f".step-00000002.{owner}" / "state.json").write_text("half")
    (tmp_path / ".mine").mkdir()
    Folder(tmp_path).clear(lambda owner: owner == "live-1")
    assert names(tmp_path) == [".mine", ".step-00000002.live-1", "step-00000001"]


def test_one_job_holds_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_LOCK_WAIT_S", 0.1)
    first, second, other = Folder(tmp_path), Folder(tmp_path), Folder(tmp_path)
    assert first.lock("job", "process 1234")
    assert not second.lock("job", "process 1235")
    with pytest.raises(CheckpointInUse, match=r"process 1234 on host \S+ writes"):
        other.lock("another", "process 1236")
    first.unlock()
    with pytest.raises(CheckpointInUse):
        other.lock("another", "process 1236")
    second.unlock()
    assert other.lock("another", "process 1236")
    other.unlock()


def test_a_forked_process_does_not_hold_the_folder(tmp_path: Path) -> None:
    first, other = Folder(tmp_path), Folder(tmp_path)
    first.lock("job", "process 1")
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        os.read(ours, 1)  # until the test has ended
        os._exit(0)
    try:
        first.unlock()
        assert other.lock("another", "process 2")
        other.unlock()
    finally:
        os.close(theirs)
        os.close(ours)
        os.waitpid(child, 0)


def test_the_lock_is_the_kernels(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.lock("job", "process 1")
    with open(tmp_path / "lock") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert json.loads((tmp_path / "lock").read_text())["holder"] == "process 1"
    folder.unlock()
