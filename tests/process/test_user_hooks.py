"""Communication hooks of the user's own: the bucket they are given, and what becomes of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from tests.process.batch import WORLDS, Batch
from tests.process.reference import (
    Chain,
    assert_grads,
    grads_of_ranks,
    mean_grads,
    rows,
    train_and_compare,
    wrap,
)

batch = Batch()

SMALL = 0.00001  # MiB: a bucket for every parameter


def _step(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step)).square().mean().backward()


def _mean(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """The mean over all ranks, as every tutorial writes it."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _sum(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _with_hook(hook: Callable[..., Any], state: Any = None, **options: Any) -> Any:
    net = wrap(Chain(), **options)
    net.register_comm_hook(state, hook)
    return net


@batch.add
def the_mean(rank: int, world: int) -> None:
    for views in (False, True):
        for cap in (None, SMALL):
            net = _with_hook(_mean, gradient_as_bucket_view=views, bucket_cap_mb=cap)
            train_and_compare(Chain, rank, world, _step, steps=3, net=net)


@batch.add
def the_result_is_not_divided(rank: int, world: int) -> None:
    net = _with_hook(_sum)
    _step(net, rank, 0)
    assert_grads(net, mean_grads(grads_of_ranks(Chain, world, _step), divisor=1))


@batch.add
def a_callable_object_with_a_state(rank: int, world: int) -> None:
    def hook(state: dict[str, int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        state["calls"] += 1
        return _mean(None, bucket)

    state = {"calls": 0}
    net = _with_hook(hook, state)
    train_and_compare(Chain, rank, world, _step, steps=3, net=net)
    assert state["calls"] >= 3


@batch.add
def what_a_bucket_shows(rank: int, world: int) -> None:
    seen: list[tuple[int, bool, list[Tensor]]] = []
    local = grads_of_ranks(Chain, world, _step)[rank]

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer, gradients, parameters = bucket.buffer(), bucket.gradients(), bucket.parameters()
        assert buffer.dim() == 1 and len(gradients) == len(parameters) > 0
        assert sum(p.numel() for p in parameters) == buffer.numel()
        for gradient, parameter in zip(gradients, parameters, strict=True):
            assert gradient.shape == parameter.shape
            if not seen_names and len(seen) < len(local):
                mine = next(n for n, p in net.module.named_parameters() if p is parameter)
                torch.testing.assert_close(gradient, local[mine])  # not divided beforehand
            start = buffer.data_ptr()
            assert start <= gradient.data_ptr() < start + buffer.nbytes, "a view of the buffer"
        seen.append((bucket.index(), bucket.is_last(), parameters))
        return _mean(state, bucket)

    seen_names: list[str] = []
    net = _with_hook(hook, bucket_cap_mb=SMALL)
    for step in range(3):
        seen.clear()
        _step(net, rank, step)
        net.zero_grad()
        seen_names.append("first step done")
        assert [index for index, _, _ in seen] == list(range(len(seen))), "in order, from 0"
        assert [last for _, last, _ in seen] == [False] * (len(seen) - 1) + [True]
        shown = [id(p) for _, _, parameters in seen for p in parameters]
        assert sorted(shown) == sorted(id(p) for p in net.parameters()), "every parameter once"
    assert len(seen) > 1, "small caps must make several buckets"


@batch.add
def another_buffer(rank: int, world: int) -> None:
    """set_buffer: what is exchanged and returned then is the hook's own tensor."""

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        bucket.set_buffer(bucket.buffer().double() / dist.get_world_size())
        assert bucket.buffer().dtype == torch.float64
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0].float())

    for views in (False, True):
        net = _with_hook(hook, gradient_as_bucket_view=views)
        train_and_compare(Chain, rank, world, _step, steps=3, net=net)


@batch.add
def gradients_changed_in_place(rank: int, world: int) -> None:
    """Clipping each gradient before the exchange, through gradients()."""

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        for gradient in bucket.gradients():
            gradient.mul_(2.0)
        return _mean(state, bucket)

    def doubled(net: nn.Module, rank: int, step: int) -> None:
        _step(net, rank, step)
        for p in net.parameters():
            p.grad.mul_(2.0)

    net = _with_hook(hook)
    _step(net, rank, 0)
    assert_grads(net, mean_grads(grads_of_ranks(Chain, world, doubled)))


@batch.add
def an_answer_without_communication(rank: int, world: int) -> None:
    net = _with_hook(lambda state, bucket: _done(torch.full_like(bucket.buffer(), 3.0)))
    _step(net, rank, 0)
    assert all(torch.equal(p.grad, torch.full_like(p, 3.0)) for p in net.parameters())


@batch.add
def an_all_gather_and_a_sum(rank: int, world: int) -> None:
    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        parts = [torch.empty_like(buffer) for _ in range(world)]
        work = dist.all_gather(parts, buffer, async_op=True)
        return work.get_future().then(lambda _: sum(parts) / world)

    train_and_compare(Chain, rank, world, _step, steps=3, net=_with_hook(hook))


@batch.add
def only_one_hook(rank: int, world: int) -> None:
    net = _with_hook(_mean)
    once = "can only be called once"
    with pytest.raises(RuntimeError, match=once):
        net.register_comm_hook(None, _mean)
    with pytest.raises(RuntimeError, match=once):
        net._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    train_and_compare(Chain, rank, world, _step, net=net)


@batch.add
def annotations_that_are_strings(rank: int, world: int) -> None:
    """What `from __future__ import annotations` leaves of a signature."""

    def hook(state: "Any", bucket: "dist.GradBucket") -> "torch.futures.Future[torch.Tensor]":
        return _mean(state, bucket)

    train_and_compare(Chain, rank, world, _step, steps=2, net=_with_hook(hook))


@batch.add
def what_cannot_be_a_hook(rank: int, world: int) -> None:
    def wrong_bucket(state: Any, bucket: int) -> torch.futures.Future[torch.Tensor]:
        raise AssertionError("never called")

    def wrong_return(state: Any, bucket: dist.GradBucket) -> int:
        raise AssertionError("never called")

    net = wrap(Chain())
    with pytest.raises(TypeError, match=r"Communication hook must be callable\."):
        net.register_comm_hook(None, 1)
    with pytest.raises(ValueError, match=r"bucket annotation should be dist\.GradBucket\."):
        net.register_comm_hook(None, wrong_bucket)
    with pytest.raises(ValueError, match="return annotation should be"):
        net.register_comm_hook(None, wrong_return)
    train_and_compare(Chain, rank, world, _step, net=net)


def _refused(rank: int, answer: Callable[[Tensor], Any], *wanted: str) -> None:
    """A hook with this answer must fail with its own name, the bucket's and what is wanted."""

    def my_wrong_hook(state, bucket):  # type: ignore[no-untyped-def]
        return answer(bucket.buffer())

    net = _with_hook(my_wrong_hook)
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        _step(net, rank, 0)
    names = {c.__name__ for c in type(caught.value).__mro__}
    assert names & {"HookFailed", "TypeError", "ValueError"}, f"{names}: {caught.value}"
    for phrase in ("my_wrong_hook", "bucket 0", *wanted):
        assert phrase in str(caught.value), f"{phrase!r} missing in: {caught.value}"


@batch.add
def a_tensor_in_place_of_a_future(rank: int, world: int) -> None:
    _refused(rank, lambda buffer: buffer, "Tensor", "Future")


@batch.add
def nothing_in_place_of_a_future(rank: int, world: int) -> None:
    _refused(rank, lambda buffer: None, "NoneType", "Future")


@batch.add
def a_future_of_nothing(rank: int, world: int) -> None:
    _refused(rank, lambda buffer: _done(None), "NoneType", "tensor")


@batch.add
def a_future_of_a_shorter_tensor(rank: int, world: int) -> None:
    _refused(rank, lambda buffer: _done(buffer[:-1]), "tensor")


@batch.add
def a_future_of_several_tensors(rank: int, world: int) -> None:
    _refused(rank, lambda buffer: _done([buffer, buffer]), "list", "tensor")


@batch.add
def a_hook_that_raises(rank: int, world: int) -> None:
    def my_raising_hook(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        raise LookupError("no such codebook")

    with pytest.raises((LookupError, RuntimeError), match="no such codebook"):
        _step(_with_hook(my_raising_hook), rank, 0)


@batch.add
def a_future_that_fails(rank: int, world: int) -> None:
    def broken(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        def decode(future: Any) -> Tensor:
            raise LookupError("no such codebook")

        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(decode)

    with pytest.raises((LookupError, RuntimeError), match="no such codebook"):
        _step(_with_hook(broken), rank, 0)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_user_hooks(name: str, world: int) -> None:
    batch.check(name, world)
