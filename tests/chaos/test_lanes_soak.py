"""Ten minutes under `closeranks run` with a kill or a stop every three seconds: the same digest.

CLOSERANKS_SOAK_S sets another length, CLOSERANKS_SOAK_SEED another course of events. What was
measured is printed at the end (`make chaos` shows it).
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import statistics
import sys
import time
from pathlib import Path

import pytest

from tests.launch.job import Running, launched
from tests.launch.test_ranks import digest_of

_LENGTH_S = float(os.environ.get("CLOSERANKS_SOAK_S", "600"))
_SEED = int(os.environ.get("CLOSERANKS_SOAK_SEED", "1"))
_EVERY_S = 3.0
_GAP_S_MAX = 1.0

TRAIN = """
    import os, sys, time
    import torch
    from torch import nn
    import closeranks as cr

    ranks = cr.Ranks(lanes=6)
    model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Dropout(0.1),
                          nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    ranks.prepare(model, optimizer)
    x = torch.randn(4800, 64, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x[:, :8].argmax(1))
    notes = os.open(f"notes-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for step in ranks.steps(data, 240, epochs=int(sys.argv[1])):
        for x, y in step:
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        os.write(notes, f"{time.monotonic():.4f} {step.number}\\n".encode())
        if step.number in (0, 20, 40):
            ranks.print("step", step.number)
        time.sleep(0.005)
    ranks.print("digest", ranks.digest())
"""


@pytest.mark.timeout(_LENGTH_S * 3 + 300)
def test_a_kill_or_a_stop_every_three_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (calm := tmp_path / "calm").mkdir()
    with launched(calm, "-n", "3", "train.py", "20", script=TRAIN) as running:
        digest_of(running.end(120.0))
    steps_per_s = _pace(calm)
    epochs = max(20, int(_LENGTH_S * steps_per_s / 20 * 0.6))  # Disturbed it is slower.
    with launched(calm, "-n", "3", "train.py", str(epochs), script=TRAIN) as running:
        undisturbed = digest_of(running.end(_LENGTH_S * 3))

    (wild := tmp_path / "wild").mkdir()
    dice, faults = random.Random(_SEED), {"kill": 0, "stop": 0}
    options = ("-n", "3", "--max-restarts", "1000", "train.py", str(epochs))
    with launched(wild, *options, script=TRAIN) as running:
        running.wait_for(running.has_said("step 40"), "the fortieth step")
        while running.process.poll() is None:
            kind = _disturb(running, wild, dice)
            if kind:
                faults[kind] += 1
            _wait(running, _EVERY_S)
        done = running.end()
    gaps = _gaps(wild)
    with capsys.disabled():
        median_ms = 1e3 * statistics.median(gaps)
        sys.stdout.write(
            f"\nsoak (seed {_SEED}): {faults['kill']} kills, {faults['stop']} stops, {len(gaps)} "
            f"steps; median {median_ms:.0f} ms, longest gap {1e3 * max(gaps):.0f} ms\n"
        )
    assert digest_of(done) == undisturbed
    assert sum(faults.values()) >= min(5, _LENGTH_S / _EVERY_S / 3), faults
    assert "all workers were gone" not in done.err
    assert max(gaps) < _GAP_S_MAX


def _disturb(running: Running, folder: Path, dice: random.Random) -> str | None:
    """Kill or stop one that trains, if another one that trains is left."""
    training = _training(folder)
    if len(training) < 2:
        return None
    victim, kind = dice.choice(training), dice.choice(["kill", "stop"])
    try:
        os.kill(victim, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "stop":
            _wait(running, dice.uniform(0.05, 1.5))
            os.kill(victim, signal.SIGCONT)
    except ProcessLookupError:  # The job has just ended.
        return None
    return kind


def _training(folder: Path) -> list[int]:
    """The processes that have finished a step in the last half second: they have the state."""
    now_s, found = time.monotonic(), []
    for path in folder.glob("notes-*"):
        lines = path.read_text().splitlines()
        pid = int(path.name.removeprefix("notes-"))
        if lines and now_s - float(lines[-1].split()[0]) < 0.5 and Path(f"/proc/{pid}").exists():
            found.append(pid)
    return sorted(found)


def _wait(running: Running, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s and running.process.poll() is None:
        time.sleep(0.02)


def _first_times(folder: Path) -> list[float]:
    """When each step was first finished by anybody."""
    first: dict[int, float] = {}
    for path in folder.glob("notes-*"):
        for at_s, number in re.findall(r"^(\S+) (\d+)$", path.read_text(), re.MULTILINE):
            first[int(number)] = min(float(at_s), first.get(int(number), float("inf")))
    return [first[number] for number in sorted(first)]


def _gaps(folder: Path) -> list[float]:
    times = sorted(_first_times(folder))
    return [b - a for a, b in itertools.pairwise(times)]


def _pace(folder: Path) -> float:
    """Steps in a second."""
    return 1.0 / statistics.median(_gaps(folder))
