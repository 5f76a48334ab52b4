"""The digits: they train, every held-out sample counts once, unequal replicas are noticed."""

import os
import subprocess
import sys

import pytest
import torch

from tests.ranks import run_ranks
from tests.tidy.findings import ROOT


def _prove(rank: int, seeds: list[int]) -> bool:
    from examples import digits

    torch.manual_seed(seeds[rank])
    return digits.prove_replicas_equal(digits.Net())


def _prove_with_one_buffer_changed(rank: int) -> bool:
    from examples import digits

    torch.manual_seed(0)
    net = digits.Net()
    if rank == 1:
        net.layers[1].num_batches_tracked += 1
    return digits.prove_replicas_equal(net)


def _evaluate(rank: int, samples: int) -> tuple[int, int]:
    from examples import digits

    labels = torch.arange(samples) % 10
    rows = torch.nn.functional.one_hot(labels, 10).float()
    rows[0] = rows[0].roll(1)  # exactly one wrong answer
    return digits.evaluate(torch.nn.Identity(), digits.TensorDataset(rows, labels))


def test_it_ends_with_equal_replicas() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr=127.0.0.1", "--nproc-per-node=2", "examples/digits.py", "--epochs=2"]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "of 400 held-out samples" in done.stdout
    assert done.stdout.endswith("The 2 replicas are equal in every bit.\n")


@pytest.mark.parametrize(("seeds", "equal"), [([3, 3], True), ([3, 4], False)])
def test_unequal_replicas_are_noticed_by_every_rank(seeds: list[int], equal: bool) -> None:
    assert run_ranks(2, _prove, seeds) == [equal, equal]


def test_a_buffer_that_differs_is_noticed() -> None:
    assert run_ranks(2, _prove_with_one_buffer_changed) == [False, False]


@pytest.mark.parametrize("samples", [9, 10, 11])
def test_every_held_out_sample_is_counted_once(samples: int) -> None:
    assert run_ranks(3, _evaluate, samples) == [(samples - 1, samples)] * 3


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from examples import digits

    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match=r"closeranks\[demo\]"):
        digits.load_digits()


def test_without_a_launcher_the_command_is_named() -> None:
    env = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [sys.executable, "examples/digits.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "closeranks run examples/digits.py" in done.stderr
