"""Kills two of its own workers in the middle of their work, and ends with the same bits.

    python examples/kill_me.py

It runs itself twice under `closeranks run` with three workers: once in peace, once with two
kill -9. The training below has not a line for that case. It says what has to survive (prepare),
and it lets ranks.steps() hand out the work.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from digits import Net, load_digits
from torch.nn.functional import cross_entropy

import closeranks as cr

KILLED = {1: 70, 2: 150}  # rank: in which step it kills itself


def train(in_peace: bool, result: Path) -> None:
    ranks = cr.Ranks(lanes=6, seed=0)
    train_set, held_out = load_digits()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    ranks.prepare(model, optimizer)

    def judge(batch):
        images, labels = batch
        return {"right": (model(images).argmax(dim=1) == labels).sum(), "seen": len(labels)}

    for step in ranks.steps(train_set, batch_size=64, epochs=10):
        for images, labels in step:
            loss = cross_entropy(model(images), labels)
            if not in_peace:
                die_if_it_is_time(ranks.rank, step.number)
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        if step.number % 44 == 43:
            sums = ranks.evaluate(held_out, batch_size=100, fn=judge)
            right = sums["right"] / sums["seen"]
            ranks.print(
                f"step {step.number + 1}: loss {step.values['loss']:.4f}, {right:.1%} right"
            )
    ranks.print(f"sha256 of weights and optimizer: {ranks.digest()[:32]}")
    ranks.once(lambda: result.write_text(ranks.digest()))


def die_if_it_is_time(rank: int, step: int) -> None:
    """Between forward and backward, with nothing handed over."""
    is_first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if is_first_life and step >= KILLED.get(rank, step + 1):
        print(f"kill -9 {os.getpid()}, in the middle of step {step + 1}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def run_twice() -> int:
    digests = []
    with tempfile.TemporaryDirectory() as folder:
        for title, options in (("Three workers, in peace:", ["--in-peace"]), ("And killed:", [])):
            print(f"\n{title}", flush=True)
            result = Path(folder) / f"digest-{len(digests)}"
            command = [sys.executable, "-m", "closeranks", "run", "-n", "3", f"--log-dir={folder}"]
            command += [__file__, f"--result={result}", *options]
            if subprocess.run(command).returncode:
                return 1
            digests.append(result.read_text())
    are_equal = digests[0] == digests[1]
    print("\nEqual in every bit." if are_equal else "\nNOT EQUAL: the training was wrong.")
    return 0 if are_equal else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--in-peace", action="store_true")
    parser.add_argument("--result", type=Path)
    values = parser.parse_args()
    if values.result is None:
        sys.exit(run_twice())
    train(values.in_peace, values.result)
