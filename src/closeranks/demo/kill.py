"""`python -m closeranks.demo.kill`: a training that kills two of its own workers, if it may.

A script of door 3, as a user would write it. It learns the digits of the other demo; what makes it
survive is that it says what has to (prepare) and lets steps() hand out the work.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

from closeranks.demo import digits
from closeranks.lanes.ranks import Ranks

_BATCH_SIZE, _EPOCHS, _SHOW_EVERY = 64, 12, 42
_KILLED = {1: 70, 2: 150}  # rank: in which step it kills itself


def main() -> int:
    parser = argparse.ArgumentParser(prog="closeranks demo --kill", description=__doc__)
    parser.add_argument("--in-peace", action="store_true", help="kill nobody")
    parser.add_argument("--result", type=Path, required=True, help="where the digest is written")
    values = parser.parse_args()
    ranks = Ranks(lanes=6, seed=0)
    task = digits.task(is_quick=False)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=task.lr)
    ranks.prepare(task.model, optimizer)

    def judge(batch: Any) -> dict[str, Any]:
        images, labels = batch
        return {"right": (task.model(images).argmax(dim=1) == labels).sum(), "seen": len(labels)}

    for step in ranks.steps(task.train_set, _BATCH_SIZE, epochs=_EPOCHS):
        for images, labels in step:
            loss = functional.cross_entropy(task.model(images), labels)
            if not values.in_peace:
                _die_if_it_is_time(ranks.rank, step.number)
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        if (step.number + 1) % _SHOW_EVERY == 0:
            sums = ranks.evaluate(TensorDataset(*task.held_out), 100, judge)
            right = f"{sums['right'] / sums['seen']:.1%} right"
            ranks.print(f"step {step.number + 1:3}  loss {step.values['loss']:.4f}  {right}")
    ranks.print(f"sha256 of weights and optimizer: {ranks.digest()}")
    ranks.once(lambda: values.result.write_text(ranks.digest()))
    return 0


def _die_if_it_is_time(rank: int, step: int) -> None:
    """Between forward and backward, with nothing handed over; once in the life of the job."""
    is_first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if is_first_life and step >= _KILLED.get(rank, step + 1):
        sys.stdout.write(f"kill -9 {os.getpid()}, in the middle of step {step + 1}\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
