"""What is built on torch's class works on ours: meshes, sharded optimizers, checkpoints."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.process.batch import WORLDS, Batch
from tests.process.reference import (
    Chain,
    assert_replicas_equal,
    assert_weights,
    descend,
    reference_grads,
    rows,
    train_and_compare,
    wrap,
)

batch = Batch()


def _step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step)).square().mean().backward()


def _train(net: Any, optimizer: Any, rank: int, steps: int) -> None:
    for step in range(steps):
        _step(net, rank, step)
        optimizer.step()
        optimizer.zero_grad()


def _descended(world: int, steps: int) -> nn.Module:
    reference = Chain()
    for step in range(steps):
        descend(reference, reference_grads(reference, world, _step, step))
    return reference


@batch.add
def it_is_an_instance_of_torchs_class(rank: int, world: int) -> None:
    net = wrap(Chain())
    assert isinstance(net, nn.parallel.DistributedDataParallel)
    assert isinstance(net, dist.algorithms.join.Joinable)


@batch.add
def a_mesh(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    net = wrap(Chain(), device_mesh=mesh)
    assert net.device_mesh is mesh
    train_and_compare(Chain, rank, world, _step, steps=3, net=net)


@batch.add
def one_dimension_of_a_mesh_of_two(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    net = wrap(Chain(), device_mesh=mesh["replicate"])
    train_and_compare(Chain, rank, world, _step, steps=3, net=net)


@batch.add
def replicated_over_shards(rank: int, world: int) -> None:
    """Tensor parallelism inside, replicas outside: the parameters are DTensors."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    plan = {"first": ColwiseParallel(), "middle": RowwiseParallel()}
    module = parallelize_module(Chain(), mesh["shard"], plan)
    net = wrap(module, device_mesh=mesh["replicate"])
    reference = Chain()
    for step in range(2):
        _step(net, rank, step)
        expected = reference_grads(reference, world, _step, step)
        for name, p in net.module.named_parameters():
            grad = getattr(p.grad, "_local_tensor", p.grad)
            torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6)
        net.zero_grad()


@batch.add
def a_zero_redundancy_optimizer(rank: int, world: int) -> None:
    for views in (False, True):
        net = wrap(Chain(), gradient_as_bucket_view=views)
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.SGD, parameters_as_bucket_view=views, lr=0.1
        )
        _train(net, optimizer, rank, 3)
        assert_weights(net, _descended(world, 3))
        optimizer.consolidate_state_dict(to=0)
        if rank == 0:
            assert optimizer.state_dict()["param_groups"]


@batch.add
def state_dicts_for_checkpoints(rank: int, world: int) -> None:
    net = wrap(Chain())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    _train(net, optimizer, rank, 2)
    model_state, optimizer_state = copy.deepcopy(get_state_dict(net, optimizer))
    assert set(model_state) == set(Chain().state_dict()), "without the prefix module."
    assert "first.weight" in optimizer_state["state"]
    fresh = wrap(Chain())
    fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    set_state_dict(
        fresh, fresh_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
    )
    for n, o in ((net, optimizer), (fresh, fresh_optimizer)):
        _train(n, o, rank, 2)
    assert_weights(fresh, net.module)


@batch.add
def a_full_state_dict(rank: int, world: int) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(wrap(Chain()), options=options)
    assert not state or set(state) == set(Chain().state_dict())
    assert state or rank != 0


@batch.add
def a_distributed_checkpoint(rank: int, world: int) -> None:
    folder = [tempfile.mkdtemp(prefix="closeranks-test-")]
    dist.broadcast_object_list(folder)
    net = wrap(Chain())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    _train(net, optimizer, rank, 2)
    dcp.save({"model": get_model_state_dict(net)}, checkpoint_id=folder[0])
    fresh = wrap(Chain())
    loaded = {"model": get_model_state_dict(fresh)}
    dcp.load(loaded, checkpoint_id=folder[0])
    fresh.module.load_state_dict(loaded["model"])
    assert_weights(fresh, net.module)
    dist.barrier()
    if rank == 0:
        for file in Path(folder[0]).iterdir():
            file.unlink()
        Path(folder[0]).rmdir()


@batch.add
def averaged_weights(rank: int, world: int) -> None:
    net = wrap(Chain())
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        _step(net, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(net)
    assert_replicas_equal(list(averaged.parameters()))
    assert averaged(rows(rank)).shape == (4, 2)
    update_bn([rows(rank, step) for step in range(2)], averaged)


@batch.add
def post_local_sgd_with_an_averager(rank: int, world: int) -> None:
    groups = [dist.new_group([r]) for r in range(world)]
    net = wrap(Chain())
    state = post_localSGD_hook.PostLocalSGDState(None, groups[rank], start_localSGD_iter=1)
    net.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), PeriodicModelAverager(period=2, warmup_steps=1)
    )
    _train(net, optimizer, rank, 4)
    assert_replicas_equal(list(net.parameters()))


@batch.add
def mixed_precision_by_autocast_and_a_scaler(rank: int, world: int) -> None:
    net, reference = wrap(Chain()), Chain()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def loss(module: nn.Module, rank: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(rows(rank)).float().square().mean()

    scaler.scale(loss(net, rank)).backward()
    scaler.unscale_(optimizer)
    expected = reference_grads(reference, world, lambda m, r, s: loss(m, r).backward(), 0)
    for name, p in net.module.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=5e-2, atol=1e-3)
    scaler.step(optimizer)
    scaler.update()
    assert_replicas_equal(list(net.parameters()))


@batch.add
def clipping_and_module_hooks(rank: int, world: int) -> None:
    calls: list[str] = []
    net = wrap(Chain())
    net.register_forward_pre_hook(lambda *_: calls.append("pre"))
    net.register_forward_hook(lambda *_: calls.append("forward"))
    net.register_full_backward_hook(lambda *_: calls.append("backward"))
    net.module.middle.register_full_backward_hook(lambda *_: calls.append("middle"))
    x = rows(rank).requires_grad_()
    net(x).square().mean().backward()
    assert sorted(calls) == ["backward", "forward", "middle", "pre"]
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    norms: list[object] = [None] * world
    dist.all_gather_object(norms, norm.item())
    assert len(set(norms)) == 1, "the norm is that of the averaged gradients"


@batch.add
def a_functional_call(rank: int, world: int) -> None:
    net = wrap(Chain())
    doubled = {name: 2 * p.detach() for name, p in net.named_parameters()}
    out = torch.func.functional_call(net, doubled, (rows(rank),))
    plain = torch.func.functional_call(
        Chain(), {n.removeprefix("module."): p for n, p in doubled.items()}, (rows(rank),)
    )
    torch.testing.assert_close(out, plain)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_on_top(name: str, world: int) -> None:
    batch.check(name, world)
