"""What is built on torch.distributed over a "closeranks" group: the same bits as over gloo."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from closeranks import DistributedDataParallel as OurDistributedDataParallel
from closeranks.exchange.passage import Passage
from tests.ranks import run_ranks


class Transformer(nn.Module):
    """Two layers, small, with sizes that no number of ranks divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 20)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(20, 4, 42, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(20, 31)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _loss(net: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 31, (4, 9), generator=generator)
    return nn.functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _digest(values: dict[str, Any]) -> str:
    sums = hashlib.sha256()
    for name in sorted(values):
        value = values[name]
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        sums.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sums.hexdigest()


def _steps(net: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        _loss(net, rank, step).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _sharded(half: bool) -> nn.Module:
    torch.manual_seed(3)
    net = Transformer()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if half else MixedPrecisionPolicy()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    return net


def _fully_shard(rank: int, folder: str, half: bool) -> tuple[str, str, int]:
    """Train, save, load into another, train on: the digests, and what went through memory."""
    passed = []
    run = Passage._pass
    Passage._pass = lambda self, what, *rest: (passed.append(what.kind), run(self, what, *rest))[1]
    net = _sharded(half)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    _steps(net, optimizer, rank, range(4))
    model_state, optimizer_state = get_state_dict(net, optimizer)
    checkpoint.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    trained = _digest(net.state_dict())
    _steps(net, optimizer, rank, range(4, 6))
    went_on = _digest(net.state_dict())

    other = _sharded(half)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    model_state, optimizer_state = get_state_dict(other, other_optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    assert _digest(other.state_dict()) == trained
    _steps(other, other_optimizer, rank, range(4, 6))
    assert _digest(other.state_dict()) == went_on
    return trained, went_on, len({"all_gather", "reduce_scatter"} & set(passed))


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_fully_shard_and_its_checkpoint(half: bool, tmp_path: Path) -> None:
    digests = {}
    for backend in ("closeranks", "gloo"):
        folder = str(tmp_path / backend)
        results = run_ranks(2, _fully_shard, folder, half, backend=backend)
        assert results[0] == results[1]
        digests[backend] = results[0][:2]
        assert results[0][2] == (2 if backend == "closeranks" else 0)
    assert digests["closeranks"] == digests["gloo"]


def _zero_redundancy(rank: int) -> tuple[str, int]:
    torch.manual_seed(3)
    net = DistributedDataParallel(Transformer())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01)
    _steps(net, optimizer, rank, range(5))
    optimizer.consolidate_state_dict(to=1)
    entries = len(optimizer.state_dict()["state"]) if rank == 1 else 0
    return _digest(net.state_dict()), entries


def test_zero_redundancy_optimizer() -> None:
    ours = run_ranks(2, _zero_redundancy, backend="closeranks")
    theirs = run_ranks(2, _zero_redundancy, backend="gloo")
    assert ours == theirs and ours[0][0] == ours[1][0] and ours[1][1] > 0


def _door_one(rank: int) -> tuple[str, str]:
    torch.manual_seed(3)
    net = OurDistributedDataParallel(Transformer())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    _steps(net, optimizer, rank, range(4))
    return net.exchange, _digest(net.state_dict())


def test_our_class_keeps_its_gradients_in_memory_over_this_group() -> None:
    ours = run_ranks(2, _door_one, backend="closeranks")
    theirs = run_ranks(2, _door_one, backend="gloo")
    assert ours == theirs
    assert ours[0][0].startswith("shm: 2 ranks on one host")


def _several_hosts(rank: int) -> tuple[str, list[float]]:
    os.environ["CLOSERANKS_HOST"] = f"host-{rank}"
    from tests.process.noticed import noticed

    with noticed() as said:
        import logging

        logging.getLogger("closeranks").setLevel(logging.INFO)
        group = dist.new_group(backend="closeranks")
        other = dist.new_group(backend="closeranks")
    tensor = torch.full((3,), float(rank))
    for each in (group, other):
        dist.all_reduce(tensor, group=each)
        dist.all_gather_single(torch.zeros(6), tensor, group=each)
        dist.barrier(group=each)
    assert sum("several hosts" in line for line in said) == 1, said
    return group.way, tensor.tolist()


def test_ranks_of_several_hosts_go_by_gloo_and_say_so_once() -> None:
    assert run_ranks(2, _several_hosts) == [("group: gloo", [2.0] * 3)] * 2
