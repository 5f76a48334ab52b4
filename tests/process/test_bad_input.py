"""What cannot work is refused at once, in torch's words where torch has some, with the way out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh

from tests.process.batch import WORLDS, Batch
from tests.process.reference import Chain, rows, train_and_compare, wrap
from tests.ranks import run_ranks

batch = Batch()


def _step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step)).square().mean().backward()


def _refused(kind: type | tuple[type, ...], phrase: str, way_out: str, do: Callable[[], Any]):  # type: ignore[no-untyped-def]
    """do() must raise this kind, with torch's phrase and something about what to do."""
    with pytest.raises(kind) as caught:
        do()
    text = str(caught.value)
    assert phrase in text, f"{phrase!r} missing in: {text}"
    assert re.search(way_out, text), f"nothing like {way_out!r} in: {text}"
    return caught.value


@batch.add
def not_a_module(rank: int, world: int) -> None:
    for thing in (Chain, torch.ones(3), [Chain()], None):
        _refused((TypeError, ValueError), "module", "nn.Module", lambda t=thing: wrap(t))


@batch.add
def lazy_parameters(rank: int, world: int) -> None:
    _refused(
        RuntimeError,
        "Modules with uninitialized parameters can't be used with `DistributedDataParallel`",
        "Run a dummy forward pass",
        lambda: wrap(nn.Sequential(nn.LazyLinear(3))),
    )


@batch.add
def nothing_to_train(rank: int, world: int) -> None:
    phrase = (
        "DistributedDataParallel is not needed when a module doesn't have any parameter that "
        "requires a gradient."
    )
    frozen = Chain().requires_grad_(False)
    for module in (nn.ReLU(), frozen):
        _refused(RuntimeError, phrase, r"gradient\. \w+", lambda m=module: wrap(m))


@batch.add
def devices_that_do_not_fit(rank: int, world: int) -> None:
    one = "device_ids can only be None or contain a single element."
    _refused(ValueError, one, r"element\. \w+", lambda: wrap(Chain(), device_ids=[0, 1]))
    gpus = "device_ids and output_device arguments only work with"
    _refused(ValueError, gpus, "Leave", lambda: wrap(Chain(), device_ids=[0]))
    _refused(ValueError, gpus, "Leave", lambda: wrap(Chain(), output_device=1))
    two_types = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    _refused(ValueError, "must be on the same type of devices", "to", lambda: wrap(two_types))


@batch.add
def two_groups(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    group = dist.new_group(list(range(world)))
    _refused(
        RuntimeError,
        "Cannot specify both process_group and device_mesh arguments.",
        r"arguments\. \w+",
        lambda: wrap(Chain(), process_group=group, device_mesh=mesh),
    )


@batch.add
def a_mesh_of_two_dimensions(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))
    _refused(
        RuntimeError,
        "Only 1D device mesh is supported, but got",
        "mesh",
        lambda: wrap(Chain(), device_mesh=mesh),
    )


@batch.add
def a_group_without_this_rank(rank: int, world: int) -> None:
    others = dist.new_group([0])
    if rank != 0:
        _refused(
            (ValueError, RuntimeError),
            "group",
            "member|rank",
            lambda: wrap(Chain(), process_group=others),
        )


@batch.add
def arguments_that_belong_together(rank: int, world: int) -> None:
    module = Chain()
    phrase = (
        "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time"
    )
    _refused(
        ValueError,
        phrase,
        "oth",
        lambda: wrap(module, param_to_hook_all_reduce=module.last.bias),
    )


@batch.add
def bucket_caps_of_nothing(rank: int, world: int) -> None:
    for cap in (0, -1, math.nan):
        _refused(
            ValueError, "bucket_cap_mb", "wanted", lambda c=cap: wrap(Chain(), bucket_cap_mb=c)
        )


@batch.add
def deprecated_arguments_warn(rank: int, world: int) -> None:
    with pytest.warns(FutureWarning, match="check_reduction"):
        wrap(Chain(), check_reduction=True)
    with pytest.warns(FutureWarning, match="broadcast_buffers"):
        wrap(Chain(), broadcast_buffers=True)


@batch.add
def a_parameter_swapped_after_wrapping(rank: int, world: int) -> None:
    """The new parameter would never be exchanged: say so before the ranks drift apart."""
    net = wrap(Chain())
    _step(net, rank, 0)
    net.module.last = nn.Linear(6, 2)
    error = _refused(RuntimeError, "last.weight", "rap", lambda: _step(net, rank, 1))
    assert type(error).__name__ == "ParameterSwapped", type(error)


class Casting(nn.Module):
    """Layers that may be of different types."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x


@batch.add
def parameters_converted_after_wrapping(rank: int, world: int) -> None:
    """Autograd accumulates elsewhere from then on, where nobody looks: say so at once."""
    for convert in (lambda net: net.double(), lambda net: net.module.layers[1].double()):
        net = wrap(Casting())
        _step(net, rank, 0)
        net.zero_grad()
        convert(net)
        error = _refused(
            RuntimeError,
            "was converted after wrapping",
            "wrap it",
            lambda net=net: _step(net, rank, 1),
        )
        assert type(error).__name__ == "ParameterSwapped", type(error)


@batch.add
def data_swapped_in_place_is_fine(rank: int, world: int) -> None:
    """What loading a checkpoint or Module.to() does."""
    net = wrap(Chain())
    _step(net, rank, 3)
    net.zero_grad()
    for name, p in Chain().named_parameters():
        net.module.get_parameter(name).data = p.detach().clone()
    train_and_compare(Chain, rank, world, _step, steps=2, net=net)


@batch.add
def an_average_that_is_none(rank: int, world: int) -> None:
    for average in ("mean", 0.5, None, [1.0]):
        _refused(
            (TypeError, ValueError), "average", "wanted", lambda a=average: wrap(Chain(), average=a)
        )


@batch.add
def an_average_beside_a_hook(rank: int, world: int) -> None:
    for average in (False, lambda: 1.0):
        net = wrap(Chain(), average=average)
        _refused(
            (TypeError, ValueError, RuntimeError),
            "average",
            "hook",
            lambda n=net: n.register_comm_hook(None, default_hooks.allreduce_hook),
        )


@batch.add
def weights_that_are_none(rank: int, world: int) -> None:
    for weight in (-1.0, math.nan, math.inf, "one", None):
        net = wrap(Chain(), average=lambda w=weight: w)
        _refused((TypeError, ValueError), "average", "wanted", lambda n=net: _step(n, rank, 0))


@batch.add
def weights_that_are_all_zero(rank: int, world: int) -> None:
    """There is no mean of nothing: an error, or no gradient at all, but no NaN."""
    net = wrap(Chain(), average=lambda: 0.0)
    try:
        _step(net, rank, 0)
    except (ValueError, RuntimeError) as error:
        assert "weight" in str(error)
    for p in net.parameters():
        assert p.grad is None or torch.isfinite(p.grad).all(), "no NaN may reach the optimizer"


@batch.add
def a_sample_rate_of_nothing(rank: int, world: int) -> None:
    _refused(
        ValueError,
        "DDP runtime logging sample rate should be equal or greater than 1",
        "1",
        lambda: wrap(Chain())._set_ddp_runtime_logging_sample_rate(0),
    )


@batch.add
def a_buffer_hook_that_is_none(rank: int, world: int) -> None:
    with pytest.raises((AssertionError, TypeError), match="callable"):
        wrap(Chain())._register_buffer_comm_hook(None, 1)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_bad_input(name: str, world: int) -> None:
    batch.check(name, world)


def _without_group(rank: int) -> str:
    phrase = "Default process group has not been initialized, please make sure to call"
    error = _refused((ValueError, RuntimeError), phrase, "torchrun|init", lambda: wrap(Chain()))
    return str(error)


def test_no_process_group() -> None:
    (text,) = run_ranks(1, _without_group, init_group=False)
    assert "init_process_group" in text
