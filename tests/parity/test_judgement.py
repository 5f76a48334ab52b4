"""The judges themselves: what is wrong is found, what is right is not.

A class that forgets the division, is off in the last bits, does not exchange or leaves the buffers
alone must not pass; torch's own class in our place must.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.parity.cases import MEAN_CASES
from tests.parity.compare import differences
from tests.parity.runs import Verdict, judge, merge
from tests.parity.training import Step, Trace
from tests.ranks import Outcome

PLAIN = "mlp-plain-sgd-mean"
WITH_BUFFERS = "conv-plain-sgd-mean"
UNUSED = next(name for name in MEAN_CASES if name.startswith("branches-no_sync-"))


def _hooked(module: nn.Module, finish: Callable[[Tensor], Tensor], **options: Any) -> TorchDDP:
    """torch's class with `finish` in the place of the division."""

    def hook(_state, bucket):  # torch rejects annotations that are strings
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda summed: finish(summed.value()[0]))

    ddp = TorchDDP(module, **options)
    ddp.register_comm_hook(None, hook)
    return ddp


def right(module: nn.Module, **options: Any) -> TorchDDP:
    return TorchDDP(module, find_unused_parameters=True, **options)


def undivided(module: nn.Module, **options: Any) -> TorchDDP:
    return _hooked(module, lambda summed: summed, **options)


def off_by_a_millionth(module: nn.Module, **options: Any) -> TorchDDP:
    return _hooked(module, lambda summed: summed / dist.get_world_size() * (1 + 1e-6), **options)


def off_by_ten_millionths(module: nn.Module, **options: Any) -> TorchDDP:
    return _hooked(module, lambda summed: summed / dist.get_world_size() * (1 + 1e-5), **options)


def without_exchange(module: nn.Module, **options: Any) -> TorchDDP:
    ddp = TorchDDP(module, **options)
    ddp.require_backward_grad_sync = False
    return ddp


def without_buffers(module: nn.Module, **options: Any) -> TorchDDP:
    return TorchDDP(module, forward_sync_buffers=False, **options)


def raises_on_rank_1(module: nn.Module, **options: Any) -> TorchDDP:
    if dist.get_rank() == 1:
        raise RuntimeError("no, thank you")
    return TorchDDP(module, **options)


@pytest.mark.parametrize("size", [2, 3])
def test_torch_in_our_place_is_faultless(size: int) -> None:
    names = [PLAIN, WITH_BUFFERS, UNUSED]
    assert judge(size, names, right) == {name: [] for name in names}


@pytest.mark.parametrize(
    ("size", "name", "wrapper", "complaint"),
    [
        (2, PLAIN, undivided, "gradient of 4.bias is off by 1.00e+00"),
        (1, PLAIN, off_by_a_millionth, "gradient of 0.weight is off"),
        (2, PLAIN, off_by_a_millionth, "at the end: 0.weight is off"),
        (3, PLAIN, off_by_ten_millionths, "step 0: gradient of 0.weight is off"),
        (2, PLAIN, without_exchange, "the ranks ended with different gradients or weights"),
        (2, WITH_BUFFERS, without_buffers, "buffer 1.running_mean is off"),
    ],
)
def test_a_wrong_class_is_found_out(size: int, name: str, wrapper: Any, complaint: str) -> None:
    problems = judge(size, [name], wrapper)[name]
    assert any(complaint in problem for problem in problems), problems


def test_a_case_that_raises_does_not_take_the_others_with_it() -> None:
    problems = judge(2, [PLAIN, WITH_BUFFERS], raises_on_rank_1)
    assert set(problems) == {PLAIN, WITH_BUFFERS}
    for name in problems:
        assert any("rank 1: Traceback" in p and "no, thank you" in p for p in problems[name])


def _trace(**changes: Any) -> Trace:
    gradient = torch.arange(1.0, 7.0).reshape(2, 3)
    step = Step({"w": gradient}, {"w": gradient.stride()}, {"b": torch.ones(2)})
    return Trace([replace(step, **changes)], {"w": gradient}, ["digest"])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"gradients": {"w": None}}, "w is absent, not torch.float32 (2, 3)"),
        ({"gradients": {"w": torch.ones(2, 3).double()}}, "w is torch.float64 (2, 3), not torch"),
        ({"gradients": {"w": torch.ones(6)}}, "w is torch.float32 (6,), not torch.float32 (2, 3)"),
        ({"gradients": {"w": torch.full((2, 3), torch.nan)}}, "gradient of w is not finite"),
        ({"gradients": {"w": torch.ones(2, 3)}}, "gradient of w is off by 7.77e-01 of its norm"),
        ({"strides": {"w": (1, 2)}}, "w has strides (1, 2), not (3, 1)"),
        ({"strides": {"w": None}}, "w has strides None, not (3, 1)"),
        ({"buffers": {"b": torch.zeros(2)}}, "buffer b is off by 1.00e+00 of its norm"),
    ],
)
def test_a_difference_is_put_into_words(changes: dict[str, Any], complaint: str | None) -> None:
    problems = differences(_trace(**changes), _trace(), exact=False, same_strides=True)
    assert len(problems) == (complaint is not None), problems
    assert complaint is None or complaint in problems[0]


@pytest.mark.parametrize("exact", [True, False])
def test_the_last_bit_counts_where_results_are_exact(exact: bool) -> None:
    gradient = torch.arange(1.0, 7.0).reshape(2, 3)
    off = {"gradients": {"w": torch.nextafter(gradient, gradient + 1)}}
    assert bool(differences(_trace(**off), _trace(), exact, same_strides=True)) is exact


def test_signs_of_zero_do_not_count() -> None:
    mine, theirs = ({"gradients": {"w": torch.full((2, 3), zero)}} for zero in (-0.0, 0.0))
    assert not differences(_trace(**mine), _trace(**theirs), exact=True, same_strides=True)


def test_ranks_that_disagree_are_found() -> None:
    outcomes = [
        Outcome(r, [Verdict([], ["same"]), Verdict([], [f"{r}"])], exitcode=0) for r in (0, 1)
    ]
    problems = merge(["first", "second"], outcomes)
    assert problems == {
        "first": [],
        "second": ["the ranks ended with different gradients or weights"],
    }


def test_a_rank_that_died_is_named_in_the_case_where_the_others_failed() -> None:
    verdicts = [Verdict([], ["same"]), Verdict(["connection closed"], raised=True)]
    outcomes = [Outcome(0, verdicts, exitcode=0), Outcome(1, trace="(no message)", exitcode=-6)]
    problems = merge(["first", "second", "third"], outcomes)
    assert problems == {
        "first": [],
        "second": ["rank 0: connection closed", "rank 1 died, exit code -6\n(no message)"],
    }
