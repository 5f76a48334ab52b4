"""Parameters that a backward does not reach: no error, and the right gradients on every rank.

A parameter unused on some ranks counts as zero there; one unused on all keeps its `.grad`.
Nothing depends on find_unused_parameters, nor on there being a next iteration.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.process.batch import WORLDS, Batch
from tests.process.reference import (
    FIND_UNUSED,
    Branches,
    assert_grads,
    assert_replicas_equal,
    assert_weights,
    descend,
    expected_grads,
    mean_grads,
    no_sync,
    reference_grads,
    rows,
    train_and_compare,
    unwrapped,
    wrap,
)

batch = Batch()


class MaybeConstant(nn.Module):
    """Its output requires grad only if `connected`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, connected: bool) -> Tensor:
        return self.layer(x) if connected else x[:, :3] * 2.0


def _one_head(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step), (0,)).square().mean().backward()


def _own_head(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step), (rank,)).square().mean().backward()


def _changing_head(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step), ((rank + step) % 3,)).square().mean().backward()


def _only_first_rank_uses_a_head(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step), (0,) if rank == 0 else ()).square().mean().backward()


@batch.add
def the_same_unused_everywhere(rank: int, world: int) -> None:
    for find_unused in FIND_UNUSED:
        train_and_compare(
            Branches, rank, world, _one_head, steps=3, find_unused_parameters=find_unused
        )


@batch.add
def the_same_unused_everywhere_in_the_only_iteration(rank: int, world: int) -> None:
    for find_unused in FIND_UNUSED:
        net = wrap(Branches(), find_unused_parameters=find_unused)
        _one_head(net, rank, 0)
        assert_grads(net, expected_grads(Branches, world, _one_head))


@batch.add
def different_ones_on_different_ranks(rank: int, world: int) -> None:
    for find_unused in FIND_UNUSED:
        for views in (False, True):
            train_and_compare(
                Branches,
                rank,
                world,
                _own_head,
                steps=2,
                find_unused_parameters=find_unused,
                gradient_as_bucket_view=views,
            )


@batch.add
def different_ones_by_rank_and_step(rank: int, world: int) -> None:
    for find_unused in FIND_UNUSED:
        train_and_compare(
            Branches, rank, world, _changing_head, steps=4, find_unused_parameters=find_unused
        )


@batch.add
def different_ones_in_many_small_buckets(rank: int, world: int) -> None:
    train_and_compare(Branches, rank, world, _changing_head, steps=4, bucket_cap_mb=0.00001)


@batch.add
def no_parameter_reached_on_all_but_one_rank(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        connected = rank == 0
        out = net(rows(rank, step), connected)
        if connected or out.requires_grad:
            out.square().mean().backward()
        else:
            assert net is unwrapped(net), "the wrapped module's output must allow backward()"

    for find_unused in FIND_UNUSED:
        train_and_compare(
            MaybeConstant, rank, world, step, steps=2, find_unused_parameters=find_unused
        )


@batch.add
def another_rank_is_the_disconnected_one_each_time(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        connected = rank != step % world
        out = net(rows(rank, step), connected)
        if connected or net is not unwrapped(net):
            out.square().mean().backward()

    train_and_compare(MaybeConstant, rank, world, step, steps=world + 1)


@batch.add
def no_parameter_reached_anywhere(rank: int, world: int) -> None:
    for find_unused in FIND_UNUSED:
        net = wrap(MaybeConstant(), find_unused_parameters=find_unused)
        net(rows(rank), False).square().mean().backward()
        assert all(p.grad is None for p in net.parameters())
        net(rows(rank), True).square().mean().backward()
        before = [p.grad.clone() for p in net.parameters()]
        net(rows(rank, 1), False).square().mean().backward()
        assert all(torch.equal(p.grad, b) for p, b in zip(net.parameters(), before, strict=True))


@batch.add
def eval_mode_and_no_grad_leave_constant_outputs_alone(rank: int, world: int) -> None:
    net = wrap(MaybeConstant())
    with torch.no_grad():
        assert not net(rows(rank), False).requires_grad
    net.eval()
    assert not net(rows(rank), False).requires_grad
    with torch.no_grad():
        assert not net(rows(rank), True).requires_grad


@batch.add
def a_loss_that_ignores_the_outputs_joins_at_the_optimizer(rank: int, world: int) -> None:
    def train(net: nn.Module, rank: int, step: int) -> None:
        out = net(rows(rank, step), (0, 1))
        if rank != 0:
            out.square().mean().backward()

    net = wrap(Branches())
    reference = Branches()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    own = torch.ones(3, requires_grad=True)
    for i in range(3):
        train(net, rank, i)
        if rank == 0:
            own.square().sum().backward()  # a loss with no way to the wrapped module
        optimizer.step()
        expected = reference_grads(reference, world, train, i)
        descend(reference, expected)
        assert_grads(net, expected)
        optimizer.zero_grad()
    assert_weights(net, reference)


@batch.add
def a_forward_that_is_only_looked_at_owes_nothing(rank: int, world: int) -> None:
    """One rank looks at outputs between its backward and its step; the others do not wait."""
    net = wrap(Branches())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        net(rows(rank, step), (0,)).square().mean().backward()
        before = net.reducer.waiter.exchange_number
        if rank == 0:
            net(rows(rank, step), (0,))
        optimizer.step()
        assert net.reducer.waiter.exchange_number == before, "the step began an exchange"
    assert_replicas_equal(list(net.parameters()))


@batch.add
def a_loss_that_ignores_the_outputs_on_every_rank(rank: int, world: int) -> None:
    net = wrap(Branches())
    before = [p.detach().clone() for p in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        net(rows(rank))
        torch.ones(3, requires_grad=True).sum().backward()
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
    train_and_compare(Branches, rank, world, _one_head, net=net)


@batch.add
def a_gradient_of_a_parameter_unused_everywhere_is_kept(rank: int, world: int) -> None:
    for views in (False, True):
        net = wrap(Branches(), find_unused_parameters=True, gradient_as_bucket_view=views)
        unused = net.module.heads[2].weight
        unused.grad = torch.full_like(unused, 1.0 + rank)
        _one_head(net, rank, 0)
        assert torch.equal(unused.grad, torch.full_like(unused, 1.0 + rank))
        assert net.module.heads[1].weight.grad is None
        assert_replicas_equal([p.grad for p in net.module.stem.parameters()])


@batch.add
def gradients_of_before_stay_where_nothing_is_used_now(rank: int, world: int) -> None:
    """Without zero_grad: what was reduced before stays, what is new is added."""

    def both(net: nn.Module, rank: int, step: int) -> None:
        _own_head(net, rank, 0)
        _one_head(net, rank, 1)

    for find_unused in FIND_UNUSED:
        net = wrap(Branches(), find_unused_parameters=find_unused)
        both(net, rank, 0)
        assert_grads(net, expected_grads(Branches, world, both))


@batch.add
def a_parameter_used_only_in_a_micro_batch_without_sync(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        with no_sync(net):
            net(rows(rank, step), (0, 1) if rank == 0 else (2,)).square().mean().backward()
        net(rows(rank, step + 10), (0,)).square().mean().backward()

    for find_unused in FIND_UNUSED:
        train_and_compare(Branches, rank, world, step, steps=3, find_unused_parameters=find_unused)


@batch.add
def an_output_that_the_loss_leaves_out(rank: int, world: int) -> None:
    """All heads run; the loss looks at one of them, another on every rank."""

    class Outputs(Branches):
        def forward(self, x: Tensor, uses: tuple[int, ...] = ()) -> dict[str, Tensor]:
            hidden = torch.tanh(self.stem(x))
            return {f"head{i}": head(hidden) for i, head in enumerate(self.heads)}

    def step(net: nn.Module, rank: int, step: int) -> None:
        net(rows(rank, step))[f"head{(rank + step) % 3}"].square().mean().backward()

    for find_unused in FIND_UNUSED:
        train_and_compare(Outputs, rank, world, step, steps=2, find_unused_parameters=find_unused)


@batch.add
def an_output_object_that_nobody_can_look_into(rank: int, world: int) -> None:
    """The outputs hide in an object of the user's own: gradients are right all the same."""

    class Box:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    class Boxed(Branches):
        def forward(self, x: Tensor, uses: tuple[int, ...] = ()) -> Box:
            return Box(super().forward(x, uses))

    def step(net: nn.Module, rank: int, step: int) -> None:
        net(rows(rank, step), (rank,)).value.square().mean().backward()

    train_and_compare(Boxed, rank, world, step, steps=2)


@batch.add
def parameters_unused_everywhere_can_be_skipped(rank: int, world: int) -> None:
    train_and_compare(
        Branches,
        rank,
        world,
        _one_head,
        steps=3,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb=0.00001,
    )


@batch.add
def the_mean_counts_every_rank(rank: int, world: int) -> None:
    """Used on rank 0 only: the gradient is rank 0's divided by the world size, not by one."""
    net = wrap(Branches())
    _only_first_rank_uses_a_head(net, rank, 0)
    alone = Branches()
    _one_head(alone, 0, 0)
    nothing = {name: None for name, _ in alone.named_parameters()}
    first = {name: p.grad for name, p in alone.named_parameters()}
    assert_grads(net, mean_grads([first] + [nothing] * (world - 1)))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_unused(name: str, world: int) -> None:
    batch.check(name, world)
