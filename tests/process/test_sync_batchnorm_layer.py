"""The layer SyncBatchNorm alone, against a BatchNorm that sees the rows of all ranks.

Every rank can compute every rank's rows, so each computes the reference for itself.
"""

from __future__ import annotations

import copy
import io
import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize

import closeranks
from closeranks import SyncBatchNorm, convert_sync_batchnorm
from closeranks.ddp import sync_batchnorm
from closeranks.ddp.sync_batchnorm import adopt
from tests.process.batch import WORLDS, Batch
from tests.process.reference import assert_replicas_equal, wrap
from tests.ranks import try_ranks

batch = Batch()

CHANNELS = 3


def _rows(rank: int, count: int, inner: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(count, CHANNELS, *inner, dtype=torch.float64, generator=generator) * 2 + 5


def _layer(kind: Any, **options: Any) -> Any:
    layer = kind(CHANNELS, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.linspace(0.5, 2.0, CHANNELS))
    return layer


def _reference(inner: tuple[int, ...]) -> Any:
    return {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[len(inner)]


def _close(actual: Tensor | None, expected: Tensor | None) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def _compare(
    rank: int,
    world: int,
    inner: tuple[int, ...] = (),
    counts: tuple[int, ...] = (4, 4, 4),
    memory_format: torch.memory_format = torch.contiguous_format,
    steps: int = 3,
    **options: Any,
) -> None:
    """Train a few steps: output, input gradient, summed parameter gradients, running statistics.

    The loss weighs every output element differently, so that no gradient vanishes by symmetry.
    """
    ours, whole = _layer(SyncBatchNorm, **options), _layer(_reference(inner), **options)
    for step in range(steps):
        shares = [_rows(r, counts[r], inner, seed=step) for r in range(world)]
        factors = [_rows(r, counts[r], inner, seed=50 + step) for r in range(world)]
        x = shares[rank].clone(memory_format=memory_format).requires_grad_()
        output = ours(x)
        (output * factors[rank]).sum().backward()
        together = torch.cat(shares).requires_grad_()
        expected = whole(together)
        (expected * torch.cat(factors)).sum().backward()
        _close(output, expected.split(list(counts[:world]))[rank])
        _close(x.grad, together.grad.split(list(counts[:world]))[rank])
        for mine, theirs in zip(ours.parameters(), whole.parameters(), strict=True):
            total = mine.grad.clone()  # a local sum: averaging is DistributedDataParallel's
            dist.all_reduce(total)
            _close(total, theirs.grad)
            mine.grad = theirs.grad = None
    assert ours.state_dict().keys() == whole.state_dict().keys()
    for mine, theirs in zip(ours.buffers(), whole.buffers(), strict=True):
        _close(mine, theirs)
    assert_replicas_equal(list(ours.buffers()))
    if counts[rank] > 1:  # evaluation stays local
        ours.eval()
        whole.eval()
        alone = _rows(rank, counts[rank], inner, seed=99)
        _close(ours(alone), whole(alone))


# --- one process with all rows ------------------------------------------------------------------


@batch.add
def inputs_of_two_to_five_dimensions(rank: int, world: int) -> None:
    for inner in [(), (5,), (4, 3), (2, 3, 4)]:
        _compare(rank, world, inner)


@batch.add
def channels_last(rank: int, world: int) -> None:
    _compare(rank, world, (4, 3), memory_format=torch.channels_last)
    _compare(rank, world, (2, 3, 4), memory_format=torch.channels_last_3d)
    x = _rows(rank, 4, (4, 3)).to(memory_format=torch.channels_last)
    assert _layer(SyncBatchNorm)(x).is_contiguous(memory_format=torch.channels_last)


@batch.add
def options_of_the_constructor(rank: int, world: int) -> None:
    for options in [
        {"affine": False},
        {"bias": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"momentum": 0.7, "eps": 1e-2},
        {"affine": False, "track_running_stats": False},
    ]:
        _compare(rank, world, (2,), **options)


@batch.add
def uneven_batches(rank: int, world: int) -> None:
    _compare(rank, world, (2, 2), counts=(1, 5, 2))
    _compare(rank, world, (), counts=(1, 1, 1))


@batch.add
def empty_batches(rank: int, world: int) -> None:
    for empty in range(world):
        counts = tuple(0 if r == empty else 2 + r for r in range(3))
        for inner in [(), (3,), (2, 2)]:
            _compare(rank, world, inner, counts=counts)


@batch.add
def nobody_has_a_row(rank: int, world: int) -> None:
    layer = _layer(SyncBatchNorm)
    x = torch.empty(0, CHANNELS, 2, dtype=torch.float64, requires_grad=True)
    output = layer(x)
    assert output.shape == x.shape
    output.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert layer.running_mean.tolist() == [0.0] * CHANNELS
    assert layer.running_var.tolist() == [1.0] * CHANNELS


@batch.add
def strided_inputs_and_gradients(rank: int, world: int) -> None:
    ours, whole = _layer(SyncBatchNorm), _layer(nn.BatchNorm1d)
    shares = [_rows(r, 4, (6,))[..., ::2].transpose(0, 2).contiguous() for r in range(world)]
    x = shares[rank].clone().requires_grad_()
    factor = torch.linspace(-1, 2, 4, dtype=torch.float64)
    (ours(x.transpose(0, 2)).transpose(0, 2) * factor).sum().backward()
    together = torch.cat([share.transpose(0, 2) for share in shares]).requires_grad_()
    (whole(together).transpose(0, 2) * factor.repeat(world)).sum().backward()
    _close(x.grad.transpose(0, 2), together.grad.split(4)[rank])
    y = _rows(rank, 4, (6,)).requires_grad_()
    ours(y).sum().backward()  # an expanded gradient: all strides 0
    _close(y.grad, torch.zeros_like(y))


# --- precision and equality of the replicas ------------------------------------------------------


@batch.add
def low_precision_is_summed_in_high_precision(rank: int, world: int) -> None:
    for dtype, layout in itertools.product(
        (torch.bfloat16, torch.float16), (torch.contiguous_format, torch.channels_last)
    ):
        shares = [_rows(r, 64, (9, 9)).to(dtype) for r in range(world)]
        together = torch.cat(shares).double().requires_grad_()
        whole = nn.BatchNorm2d(CHANNELS, dtype=torch.float64)
        ours = SyncBatchNorm(CHANNELS)  # float32 parameters, as under autocast
        x = shares[rank].to(memory_format=layout).requires_grad_()
        factors = [(_rows(r, 64, (9, 9), seed=9) - 5).to(dtype) for r in range(world)]
        output = ours(x)
        assert output.dtype == dtype
        (output * factors[rank]).sum().backward()
        (whole(together) * torch.cat(factors)).sum().backward()
        for mine, theirs in zip(ours.buffers(), whole.buffers(), strict=True):
            torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-6, atol=1e-6)
        for mine, theirs in zip(ours.parameters(), whole.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            total = mine.grad.double()
            dist.all_reduce(total)
            # Sums of thousands of products; in half precision they would be wrong by 1.
            torch.testing.assert_close(total, theirs.grad, rtol=1e-5, atol=1e-2)
        assert x.grad is not None and x.grad.dtype == dtype
        wanted = together.grad.split(64)[rank]
        torch.testing.assert_close(x.grad.double(), wanted, rtol=2e-2, atol=2e-3)


@batch.add
def a_mean_far_from_zero_costs_no_variance(rank: int, world: int) -> None:
    shares = [(_rows(r, 50, ()) + 3000).float() for r in range(world)]
    ours = SyncBatchNorm(CHANNELS, momentum=1.0)
    ours(shares[rank])
    together = torch.cat(shares).double()
    torch.testing.assert_close(ours.running_var.double(), together.var(0), rtol=1e-3, atol=0.0)


@batch.add
def statistics_are_bitwise_equal(rank: int, world: int) -> None:
    ours = SyncBatchNorm(CHANNELS)
    for step in range(5):
        ours(_rows(rank, 1 + 7 * rank, (11,), seed=step).float())
    assert_replicas_equal(list(ours.buffers()))
    everyones = [torch.empty(CHANNELS) for _ in range(world)]
    dist.all_gather(everyones, ours.running_var)
    assert all(torch.equal(each, everyones[0]) for each in everyones)


# --- who exchanges with whom, and how often ------------------------------------------------------


@batch.add
def a_group_of_some_ranks(rank: int, world: int) -> None:
    pair = dist.new_group([0, 1])  # every rank makes it; rank 2 is not in it
    alone = [dist.new_group([r]) for r in range(world)][rank]
    shares = [_rows(r, 4, ()) for r in range(world)]
    in_pair = _layer(SyncBatchNorm, process_group=pair)(shares[rank])
    together = torch.cat(shares[:2]) if rank < 2 else shares[rank]
    _close(in_pair, _layer(nn.BatchNorm1d)(together)[-4:] if rank else in_pair)
    if rank < 2:
        _close(in_pair, _layer(nn.BatchNorm1d)(together).split(4)[rank])
    in_one = _layer(SyncBatchNorm, process_group=alone)(shares[rank])
    _close(in_one, _layer(nn.BatchNorm1d)(shares[rank]))


@batch.add
def evaluation_exchanges_nothing(rank: int, world: int) -> None:
    if rank == 0:  # it would wait for the others
        x = _rows(0, 4, ())
        for options in [{}, {"track_running_stats": False}]:
            ours, whole = _layer(SyncBatchNorm, **options), _layer(nn.BatchNorm1d, **options)
            _close(ours.eval()(x), whole.eval()(x))


@batch.add
def one_exchange_forward_and_one_backward(rank: int, world: int) -> None:
    count = 0
    exchange = sync_batchnorm._exchange

    def counting(*arguments: Any) -> None:
        nonlocal count
        count += 1
        exchange(*arguments)

    sync_batchnorm._exchange = counting
    try:
        ours = _layer(SyncBatchNorm)
        output = ours(_rows(rank, 4, ()).requires_grad_())
        assert count == 1
        output.sum().backward()
        assert count == 2
        ours(_rows(rank, 4, ())).sum().backward()  # nobody asks for the input's gradient
        assert count == 3
    finally:
        sync_batchnorm._exchange = exchange


@batch.add
def frozen_parameters_get_no_gradient(rank: int, world: int) -> None:
    ours = _layer(SyncBatchNorm).requires_grad_(False)
    x = _rows(rank, 4, ()).requires_grad_()
    ours(x).square().sum().backward()
    assert x.grad is not None and ours.weight.grad is None and ours.bias.grad is None
    ours.weight.requires_grad_()
    ours(_rows(rank, 4, ())).square().sum().backward()
    assert ours.weight.grad is not None and ours.bias.grad is None


class Branching(nn.Module):
    """The last layer exists twice; each rank uses another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, CHANNELS)
        self.norm = nn.BatchNorm1d(CHANNELS)
        self.last = nn.ModuleList([nn.Linear(CHANNELS, 500) for _ in range(2)])

    def forward(self, x: Tensor, branch: int) -> Tensor:
        output: Tensor = self.last[branch](self.norm(self.first(x)))
        return output


@batch.add
def ranks_that_use_different_parameters(rank: int, world: int) -> None:
    """Buckets leave at different moments on different ranks, here before and after the layer's."""
    net, whole = wrap(convert_sync_batchnorm(Branching()), bucket_cap_mb=0.001), Branching()
    for step in range(3):
        shares = [torch.randn(4, 4, generator=_seeded(10 * step + r)) for r in range(world)]
        net(shares[rank], rank % 2).square().mean().backward()
        hidden = whole.norm(whole.first(torch.cat(shares))).split(4)
        losses = [whole.last[r % 2](part).square().mean() for r, part in enumerate(hidden)]
        (sum(losses) / world).backward()
        for mine, theirs in zip(net.module.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
        net.zero_grad()
        whole.zero_grad()


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@batch.add
def in_a_compiled_model(rank: int, world: int) -> None:
    net = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), nn.BatchNorm1d(CHANNELS), nn.ReLU())
    eager = convert_sync_batchnorm(net.double())
    traced = copy.deepcopy(eager)
    compiled = torch.compile(traced, backend="aot_eager")
    for step in range(2):
        x = _rows(rank, 4, (), seed=step)
        eager(x).square().sum().backward()
        compiled(x).square().sum().backward()
    for mine, theirs in zip(traced.parameters(), eager.parameters(), strict=True):
        _close(mine.grad, theirs.grad)
    for mine, theirs in zip(traced.buffers(), eager.buffers(), strict=True):
        _close(mine, theirs)


# --- what is refused ------------------------------------------------------------------------------


@batch.add
def one_value_per_channel_is_refused_everywhere(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        _layer(SyncBatchNorm)(_rows(rank, 1 if rank == 0 else 0, ()))


@batch.add
def bad_inputs_are_refused_before_anything_is_exchanged(rank: int, world: int) -> None:
    if rank == 0:
        layer = SyncBatchNorm(4)
        with pytest.raises(ValueError, match="with 4 channels, got 3"):
            layer(_rows(0, 4, ()).float())
        with pytest.raises(ValueError, match="at least 2D"):
            layer(torch.ones(4))
        with pytest.raises(ValueError, match="non-zero"):
            layer(torch.ones(4, 0))


@batch.add
def a_second_derivative_is_refused(rank: int, world: int) -> None:
    x = _rows(rank, 4, ()).requires_grad_()
    (grad,) = torch.autograd.grad(_layer(SyncBatchNorm)(x).pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_sync_batchnorm_layer(name: str, world: int) -> None:
    batch.check(name, world)


def _run_one_layer_too_few(rank: int) -> None:
    layer = _layer(SyncBatchNorm)
    layer(_rows(rank, 4, ()))
    if rank == 0:
        layer(_rows(rank, 4, ()))
    time.sleep(3)


def test_a_rank_that_skips_a_layer_is_an_error_that_says_what_to_look_for() -> None:
    first, second = try_ranks(2, _run_one_layer_too_few, group_timeout_s=1.0)
    assert first.error_type is not None and first.error_type.startswith("ExchangeFailed,")
    assert "same SyncBatchNorm layers in the same order" in str(first.error)
    assert first.seconds < 10
    assert second.error is None


# --- conversion, and alone: no process group ------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(CHANNELS)
        self.inner = nn.Sequential(nn.BatchNorm2d(2, affine=False), nn.BatchNorm3d(2))
        self.again = self.first  # a shared layer
        self.instance = nn.InstanceNorm1d(2, track_running_stats=True)


def test_conversion_keeps_every_object_and_flag() -> None:
    net = Net()
    net.first.weight.requires_grad_(False)
    net.inner[0].eval()
    calls: list[int] = []
    net.first.register_forward_hook(lambda *_: calls.append(1))
    tensors = [*net.parameters(), *net.buffers()]
    converted = convert_sync_batchnorm(net)
    assert converted is net and net.again is net.first
    layers = [net.first, *net.inner]
    assert [type(layer) for layer in layers] == 3 * [SyncBatchNorm]
    assert all(isinstance(layer, nn.SyncBatchNorm) for layer in layers)
    assert type(net.instance) is nn.InstanceNorm1d
    kept = [*net.parameters(), *net.buffers()]
    assert all(a is b for a, b in zip(tensors, kept, strict=True))
    assert not net.first.weight.requires_grad and net.first.bias.requires_grad
    assert [layer.training for layer in layers] == [True, False, True]
    net.first(torch.randn(4, CHANNELS))
    assert calls == [1]


def test_a_layer_by_itself_is_converted() -> None:
    layer = nn.BatchNorm2d(2)
    assert type(convert_sync_batchnorm(layer)) is SyncBatchNorm
    assert type(SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(2))) is SyncBatchNorm
    assert type(nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(2))) is nn.SyncBatchNorm


def test_process_groups_are_given_and_kept() -> None:
    group, other = object(), object()
    net = nn.Sequential(nn.BatchNorm1d(2), nn.SyncBatchNorm(2, process_group=group))
    convert_sync_batchnorm(net)
    assert [layer.process_group for layer in net] == [None, group]
    assert [type(layer) for layer in net] == 2 * [SyncBatchNorm]
    convert_sync_batchnorm(net, other)
    assert [layer.process_group for layer in net] == [other, other]


def test_layers_that_cannot_be_converted_are_named() -> None:
    with pytest.raises(ValueError, match=r"cannot convert 1, a LazyBatchNorm1d.*forward pass"):
        convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d()))
    layer = nn.BatchNorm1d(2)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    with pytest.raises(ValueError, match=r"cannot convert module, a Parametrized.*parametriz"):
        convert_sync_batchnorm(layer)


def test_a_lazy_layer_that_knows_its_size_is_converted() -> None:
    layer = nn.LazyBatchNorm1d()
    layer(torch.randn(4, 2))
    assert type(convert_sync_batchnorm(layer)) is SyncBatchNorm


class UsersOwn(nn.SyncBatchNorm):
    pass


def test_adoption_takes_torchs_layers_on_the_cpu_only() -> None:
    net = nn.Sequential(
        nn.SyncBatchNorm(2),
        nn.SyncBatchNorm(2, affine=False, track_running_stats=False),
        nn.SyncBatchNorm(2, device="meta"),
        UsersOwn(2),
        nn.BatchNorm1d(2),
    )
    before = list(net)
    adopt(net)
    assert all(a is b for a, b in zip(before, net, strict=True))
    classes = [SyncBatchNorm, SyncBatchNorm, nn.SyncBatchNorm, UsersOwn, nn.BatchNorm1d]
    assert [type(layer) for layer in net] == classes


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"track_running_stats": False}])
def test_without_a_group_it_is_an_ordinary_batch_norm(options: dict[str, Any]) -> None:
    ours, whole = _layer(SyncBatchNorm, **options), _layer(nn.BatchNorm1d, **options)
    for seed in range(2):
        _close(ours(_rows(0, 4, (2,), seed)), whole(_rows(0, 4, (2,), seed)))
    for mine, theirs in zip(ours.buffers(), whole.buffers(), strict=True):
        _close(mine, theirs)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        ours(_rows(0, 1, ()))


def test_copies_and_pickles_are_layers_of_the_same_class() -> None:
    layer = convert_sync_batchnorm(nn.BatchNorm1d(2))
    assert type(copy.deepcopy(layer)) is SyncBatchNorm
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is SyncBatchNorm
    assert str(loaded) == str(nn.SyncBatchNorm(2))
    assert closeranks.SyncBatchNorm is SyncBatchNorm
