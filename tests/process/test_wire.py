"""Wire formats under DistributedDataParallel, over a gloo group: DDP(model, wire=...).

All formats keep replicas equal to the bit; what they lose in one step they send in a later one.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from closeranks.exchange.agreement import second_group
from closeranks.exchange.group import GroupExchange
from closeranks.exchange.layout import Layout, Piece
from closeranks.exchange.wired import WiredExchange
from closeranks.wire.formats import parse
from tests.process.batch import WORLDS, Batch
from tests.process.exchange_ways import CPU, plain_wait
from tests.process.noticed import noticed
from tests.process.reference import (
    assert_grads,
    assert_replicas_equal,
    descend,
    mean_grads,
    no_sync,
    reference_grads,
    rows,
    wrap,
)
from tests.process.wide import FORMATS, NEAR, Wide, near, step_of
from tests.ranks import run_ranks, try_ranks

GROUP = {"CLOSERANKS_EXCHANGE": "group"}

batch = Batch(env=GROUP)
of_four = Batch(env=GROUP)  # the scenarios for which it matters how many ranks there are


class Given(nn.Module):
    """Its gradient is what backward() is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(60, 40))

    def forward(self) -> Tensor:
        return self.weight * 1.0


def _for_formats(scenario: Callable[[int, int, str], None]) -> None:
    for form in FORMATS:

        def one(rank: int, world: int, form: str = form) -> None:
            scenario(rank, world, form)

        one.__name__ = one.__qualname__ = f"{scenario.__name__}_{form.replace(':', '_')}"
        one.__module__ = __name__
        globals()[one.__name__] = one
        batch.add(one)


@_for_formats
def replicas_are_equal_over_fifty_steps(rank: int, world: int, form: str) -> None:
    net = wrap(Wide(), wire=form, bucket_cap_mb=0.004)
    assert net.exchange == f"group: gloo, {form}"
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(50):
        optimizer.zero_grad()
        step_of(net, rank, step)
        optimizer.step()
        if step % 7 == 0:
            assert_replicas_equal(list(net.parameters()))
    assert_replicas_equal(list(net.parameters()))
    assert len(net.reducer.fleet.buckets) > 2, "several reductions are under way at a time"


@_for_formats
def a_constant_gradient_is_learned_from_as_if_it_were_exact(
    rank: int, world: int, form: str
) -> None:
    """What a step does not send, a later one does: sums over steps come near the exact sum."""
    torch.manual_seed(1)
    model, steps = Given(), 60
    net = wrap(model, wire=form)
    given = [torch.randn(60, 40, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    wanted = sum(given) / world
    total, errors = torch.zeros(60, 40), []
    for step in range(1, steps + 1):
        model.weight.grad = None
        net().backward(given[rank])
        assert model.weight.grad is not None
        total += model.weight.grad
        errors.append(float((total / step - wanted).norm() / wanted.norm()))
    assert errors[-1] < 0.25 if form.startswith("powersgd") else errors[-1] < 2e-3, errors
    assert errors[-1] < 0.3 * errors[0] + 1e-6, errors


@_for_formats
def one_step_comes_near_the_mean(rank: int, world: int, form: str) -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        net, reference = wrap(Wide(), wire=form, **options), Wide()
        for step in range(3):
            net.zero_grad()
            step_of(net, rank, step)
            if step == 0:  # Later ones also have what the first did not send.
                near(net, reference_grads(reference, world, step_of, step), form)
        assert_replicas_equal([p.grad for p in net.module.parameters()])


@_for_formats
def accumulated_and_summed_gradients(rank: int, world: int, form: str) -> None:
    def accumulating(net: nn.Module, rank: int, step: int) -> None:
        with no_sync(net):
            step_of(net, rank, 10)
        step_of(net, rank, 11)

    net, reference = wrap(Wide(), wire=form), Wide()
    accumulating(net, rank, 0)
    near(net, reference_grads(reference, world, accumulating, 0), form)

    net = wrap(Wide(), wire=form, average=False)
    step_of(net, rank, 0)
    expected = reference_grads(reference, world, step_of, 0)
    near(net, {n: None if g is None else g * world for n, g in expected.items()}, form)


@_for_formats
def two_backwards_exchange_each_increment_once(rank: int, world: int, form: str) -> None:
    def twice(net: nn.Module, rank: int, step: int) -> None:
        step_of(net, rank, 20)
        step_of(net, rank, 21)

    net = wrap(Wide(), wire=form)
    twice(net, rank, 0)
    near(net, reference_grads(Wide(), world, twice, 0), form)


@_for_formats
def weights_of_ranks(rank: int, world: int, form: str) -> None:
    net = wrap(Wide(), wire=form, average=lambda: float(rank + 1))
    step_of(net, rank, 0)
    per_rank = []
    for other in range(world):
        module = Wide()
        step_of(module, other, 0)
        weight = (other + 1) * 2 / (world + 1)  # their mean over ranks is one
        per_rank.append(
            {n: None if p.grad is None else p.grad * weight for n, p in module.named_parameters()}
        )
    near(net, mean_grads(per_rank), form)


@_for_formats
def what_is_not_finite_arrives_and_is_gone_a_step_later(rank: int, world: int, form: str) -> None:
    model = Given()
    net = wrap(model, wire=form)
    given = torch.randn(60, 40)
    spoiled = given.clone()
    if rank == world - 1:
        spoiled[3, 5], spoiled[30, 6], spoiled[59, 39] = torch.inf, -torch.inf, torch.nan
    for gradient in (given, spoiled, given):
        model.weight.grad = None
        net().backward(gradient)
        grad = model.weight.grad
        assert grad is not None
        assert_replicas_equal([grad.nan_to_num(123.0)])
        if gradient is spoiled:
            assert grad[3, 5] == torch.inf and grad[30, 6] == -torch.inf and grad[59, 39].isnan()
            assert int((~grad.isfinite()).sum()) == 3
    assert grad.isfinite().all()


@_for_formats
def a_resumed_run_goes_on_to_the_same_bits(rank: int, world: int, form: str) -> None:
    def train(net: Any, optimizer: Any, steps: range) -> list[Tensor]:
        for step in steps:
            optimizer.zero_grad()
            step_of(net, rank, step)
            optimizer.step()
        return [p.detach().clone() for p in net.parameters()]

    net = wrap(Wide(), wire=form, bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    train(net, optimizer, range(6))
    saved = io.BytesIO()
    torch.save([net.state_dict(), optimizer.state_dict(), net.wire_state_dict()], saved)
    assert not any("wire" in key or "residual" in key for key in net.state_dict())
    wanted = train(net, optimizer, range(6, 12))

    for loads in (True, False):
        saved.seek(0)
        state = torch.load(saved, weights_only=True)
        resumed = wrap(Wide(), wire=form, bucket_cap_mb=0.004)
        optimizer = torch.optim.SGD(resumed.parameters(), lr=0.05, momentum=0.9)
        resumed.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        if loads:
            resumed.load_wire_state_dict(state[2])
        found = train(resumed, optimizer, range(6, 12))
        same = all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
        assert same == loads, "what was not sent matters, and is there again"


@batch.add
def a_state_of_another_rank_or_moment_is_refused_on_all(rank: int, world: int) -> None:
    net = wrap(Wide(), wire="int8")
    step_of(net, rank, 0)
    early = net.wire_state_dict()
    step_of(net, rank, 1)
    late = net.wire_state_dict()
    before = net.reducer.fleet.order
    for state, words in (
        (late if rank == 0 else early, "different moments"),
        ({**late, "rank": 99}, "rank=99"),
        ({**late, "size": 99}, "size=99"),
        ({**late, "wire": "bf16"}, "wire='bf16'"),
        ({**late, "version": 0}, "version"),
        ({**late, "order": ["nobody"]}, "'nobody'"),
    ):
        with pytest.raises(ValueError, match="Nothing was loaded") as caught:
            net.load_wire_state_dict(state)
        assert words in str(caught.value)
        # One rank's mistake is an error on all.
        with pytest.raises(ValueError, match="Nothing was loaded"):
            net.load_wire_state_dict(state if rank == world - 1 else late)
    assert net.reducer.fleet.order == before
    net.load_wire_state_dict(late)
    step_of(net, rank, 2)


@batch.add
def copies_have_the_format_and_nothing_unsent(rank: int, world: int) -> None:
    for form in ("int8", "powersgd:2"):
        net = wrap(Wide(), wire=form)
        step_of(net, rank, 0)
        net.zero_grad()
        for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            step_of(twin, rank, 0)
            near(twin, reference_grads(Wide(), world, step_of, 0), form)
            assert twin.exchange == f"group: gloo, {form}"
            assert_replicas_equal([p.grad for p in twin.parameters()])


class Mixed(nn.Module):
    """Parameters that no format touches, and one of half precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.wide = nn.Parameter(torch.randn(50, 40, dtype=torch.float64))
        self.tiny = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.narrow = nn.Parameter(torch.randn(60, 40).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        double = (x.double() @ self.wide.t()).square().mean()
        half = (x.bfloat16() @ self.narrow.t()).float().square().mean()
        return double + half + (self.tiny * x[0, :7]).abs().square().sum()


@batch.add
def types_that_a_format_does_not_know_stay_exact(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        net(rows(rank, step, 4, 40)).backward()

    for form in FORMATS:
        net, reference = wrap(Mixed(), wire=form), Mixed()
        step(net, rank, 0)
        expected = reference_grads(reference, world, step, 0)
        for name in ("wide", "tiny"):
            torch.testing.assert_close(getattr(net.module, name).grad, expected[name])
        grad, wanted = net.module.narrow.grad, expected["narrow"]
        assert grad.dtype is torch.bfloat16 and wanted is not None
        assert_replicas_equal([grad])
        if form in NEAR:
            assert (grad - wanted).abs().max() <= 0.04 * wanted.abs().max()


@batch.add
def small_tensors_stay_exact(rank: int, world: int) -> None:
    def step(net: nn.Module, rank: int, step: int) -> None:
        net(rows(rank, step)).square().mean().backward()

    for form in FORMATS:
        net, reference = wrap(nn.Linear(4, 5), wire=form), nn.Linear(4, 5)
        reference.load_state_dict(net.module.state_dict())
        for i in range(2):
            net.zero_grad()
            step(net, rank, i)
            assert_grads(net, reference_grads(reference, world, step, i))


@batch.add
def a_comm_hook_and_a_format_exclude_each_other(rank: int, world: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    net = wrap(Wide(), wire="int8")
    with pytest.raises(ValueError, match="wire='int8'"):
        net.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match="wire='int8'"):
        net._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    step_of(net, rank, 0)
    from torch.nn.parallel.distributed import _MixedPrecision

    with pytest.raises(ValueError, match="mixed_precision"):
        wrap(Wide(), wire="int8", mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    net = wrap(Wide(), wire="exact")
    net.register_comm_hook(None, allreduce_hook)
    step_of(net, rank, 0)


def _refused(rank: int, world: int, mine: Any) -> str:
    with pytest.raises(ValueError, match="No rank trains") as caught:
        wrap(Wide(), wire=mine)
    texts: list[Any] = [None] * world
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1, texts
    return str(caught.value)


@batch.add
def wishes_that_differ_or_mean_nothing(rank: int, world: int) -> None:
    last = rank == world - 1
    text = _refused(rank, world, "int8" if last else "bf16")
    assert "'bf16' on rank 0" in text and f"'int8' on rank {world - 1}" in text
    text = _refused(rank, world, "int8" if last else None)
    assert "'exact' on rank 0" in text
    text = _refused(rank, world, "int9")
    assert "'int9' on rank 0" in text and "powersgd:RANK" in text
    text = _refused(rank, world, "powersgd:0" if last else "powersgd:2")
    assert f"'powersgd:0' on rank {world - 1}" in text
    _refused(rank, world, 8)
    _refused(rank, world, "x" * 500 + "\u00e9" * 100)
    with pytest.raises(ValueError, match="No rank trains"):
        wrap(Wide(), wire="int8" if last else None, init_sync=False)


@batch.add
def the_argument_wins_over_the_environment(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLOSERANKS_WIRE", "int8")
        assert wrap(Wide()).exchange == "group: gloo, int8"
        assert wrap(Wide(), wire="bf16").exchange == "group: gloo, bf16"
        assert wrap(Wide(), wire="exact").exchange == "group: gloo"
        patch.setenv("CLOSERANKS_WIRE", "int9")
        with pytest.raises(ValueError, match="int9"):
            wrap(Wide())


@batch.add
def ranks_may_run_out_of_data(rank: int, world: int) -> None:
    for form in ("int8", "powersgd:2"):
        net = wrap(Wide(), wire=form)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        with net.join():
            for step in range(4 + rank):
                optimizer.zero_grad()
                step_of(net, rank, step)
                optimizer.step()
        assert_replicas_equal(list(net.parameters()))
        assert all(p.isfinite().all() for p in net.parameters())


@batch.add
def waits_may_come_in_any_order(rank: int, world: int) -> None:

    for form in FORMATS:
        group = GroupExchange(dist.distributed_c10d._get_default_group())
        exchange = WiredExchange(group, parse(form))
        layouts = [Layout((Piece(f"p{n}", 0, 50, 60),)) for n in range(6)]
        tensors = [torch.full((3000,), float(n + rank)) for n in range(6)]
        pending = [exchange.all_reduce(t, 0.5, w) for t, w in zip(tensors, layouts, strict=True)]
        between = exchange.all_reduce(torch.full((3000,), 1.0))
        for n in (4, 0, 5, 1, 2, 3):
            pending[n].wait()
        between.wait()
        for n, tensor in enumerate(tensors):
            wanted = 0.5 * sum(n + r for r in range(world))
            assert (tensor - wanted).abs().max() <= 0.02 * wanted + 1e-3, (form, n)


@batch.add
def auto_measures_says_why_and_touches_no_random_numbers(rank: int, world: int) -> None:
    model = Wide()
    state = torch.get_rng_state()
    net = wrap(model, wire="auto")
    assert torch.equal(state, torch.get_rng_state())
    assert net.exchange == "group: gloo, auto: not measured yet"
    with noticed() as said, _info():
        step_of(net, rank, 0)
    assert torch.equal(state, torch.get_rng_state())
    lines = [line for line in said if line.startswith("wire auto")]
    if rank == 0:
        assert lines and "Mbit/s" in lines[0] and "exact" in lines[0], said
    assert net.exchange.startswith("group: gloo, auto: ")
    texts: list[Any] = [None] * world
    dist.all_gather_object(texts, net.exchange)
    assert len(set(texts)) == 1
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(5):
        optimizer.step()
        step_of(net, rank, step)
    assert_replicas_equal(list(net.parameters()))


@contextlib.contextmanager
def _info() -> Any:
    import logging

    log = logging.getLogger("closeranks")
    level = log.level
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)


@batch.add
def auto_changes_its_mind_when_the_link_drifts(rank: int, world: int) -> None:
    """The link is said to be slow, then fast; what was not sent goes with the next exact sum."""
    from closeranks.exchange import auto

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "LOOK_EVERY", 3)
        rates = iter([1e6, 1e6] + [1e12] * 50)
        now = [1e6]

        def rate(self: Any, seconds: float, latency_s: float) -> float:
            now[0] = next(rates)
            return now[0]

        patch.setattr(auto.Auto, "_rate", rate)
        net = wrap(Wide(), wire="auto")
        model, total, wanted = net.module, None, None
        seen = []
        for step in range(10):
            net.zero_grad()
            step_of(net, rank, step)
            seen.append(net.exchange.rpartition(" ")[2])
            reference = copy.deepcopy(model)
            expected = reference_grads(reference, world, step_of, step)["first.weight"]
            grad = model.first.weight.grad.clone()
            total = grad if total is None else total + grad
            wanted = expected if wanted is None else wanted + expected
        assert seen[0] != "exact" and seen[-1] == "exact", seen
        assert seen.index("exact") == 6, "the second look finds the drift; new buckets do not count"
        torch.testing.assert_close(total, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", batch.names())
def test_wire(name: str, world: int) -> None:
    batch.check(name, world)


for name in batch.names():
    if name.startswith("replicas_are_equal") or name == "waits_may_come_in_any_order":
        of_four.add(globals()[name])


@pytest.mark.parametrize("name", of_four.names())
def test_wire_with_four_ranks(name: str) -> None:
    of_four.check(name, 4)


def _on_one_host(rank: int) -> tuple[str, list[str]]:
    with noticed() as said, _info():
        net = wrap(Wide(), wire="int8")
    net2, reference = wrap(Wide(), wire="int8"), Wide()
    step_of(net2, rank, 0)
    assert_grads(net2, reference_grads(reference, 2, step_of, 0))
    state = net2.wire_state_dict()
    net2.load_wire_state_dict(state)
    return net.exchange, said


def test_ranks_that_share_memory_stay_exact_and_one_says_so() -> None:
    found = run_ranks(2, _on_one_host)
    assert found[0][0].startswith("shm"), found
    assert [sum("stay exact" in line for line in said) for _, said in found] == [1, 0]


def _alone(rank: int) -> None:
    net = wrap(Wide(), wire="int8")
    step_of(net, 0, 0)
    assert_grads(net, reference_grads(Wide(), 1, step_of, 0))
    with pytest.raises(ValueError, match="int9"):
        wrap(Wide(), wire="int9")


def test_one_rank_has_no_network() -> None:
    run_ranks(1, _alone)


def _twins(rank: int, world: int) -> list[bytes]:
    weights: list[bytes] = []
    for form in ("int8", "powersgd:2"):
        net = wrap(Wide(), wire=form)
        for step in range(5):
            step_of(net, rank, step)
            descend(net.module, {n: p.grad for n, p in net.module.named_parameters()})
            net.zero_grad()
        weights += [p.detach().numpy().tobytes() for p in net.parameters()]
    return weights


@pytest.mark.parametrize("world", (2, 3))
def test_kernels_in_c_and_in_python_train_to_the_same_bits(world: int) -> None:
    in_c = run_ranks(world, _twins, world, env=GROUP)
    in_python = run_ranks(world, _twins, world, env={**GROUP, "CLOSERANKS_KERNELS": "python"})
    assert in_c[0] == in_python[0] == in_c[-1]


def _lost(rank: int) -> None:
    import os

    net = wrap(Wide(), wire="int8")
    step_of(net, rank, 0)
    if rank == 2:
        os._exit(3)
    step_of(net, rank, 1)


def test_a_rank_that_dies_is_named() -> None:
    outcomes = try_ranks(3, _lost, env=GROUP, group_timeout_s=8.0)
    assert outcomes[2].exitcode == 3
    for outcome in outcomes[:2]:
        assert outcome.error_type is not None and "ExchangeFailed" in outcome.error_type
        assert outcome.error is not None and "bucket" in outcome.error


def _one_waits_before_it_goes_on(rank: int, form: str) -> None:
    """Between hosts a rank may come to the second reduction only when all have the first."""
    group = GroupExchange(dist.new_group())
    second = second_group(group, CPU, plain_wait)
    assert second is not None
    exchange = WiredExchange(group, parse(form), second)
    layouts = [Layout((Piece(f"p{n}", 0, 50, 60),)) for n in range(2)]
    tensors = [torch.full((3000,), float(n + rank)) for n in range(2)]

    def start(n: int) -> Any:
        return exchange.all_reduce(tensors[n], 0.5, layouts[n])

    for _ in range(3):
        early = [start(0), start(1)] if rank == 0 else [start(0)]
        early[0].wait()
        dist.barrier()
        (early[1] if rank == 0 else start(1)).wait()
    assert_replicas_equal(tensors)


@pytest.mark.parametrize("form", ("int8", "powersgd:2"))
def test_a_wait_is_for_nothing_that_was_asked_for_later(form: str) -> None:
    run_ranks(2, _one_waits_before_it_goes_on, form, deadline_s=30.0)
