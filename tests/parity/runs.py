"""Runs many cases in one set of rank processes and says of each what was wrong with it.

Starting ranks costs more than a case does, so all cases of a world size share them. A case that
raises ends the ranks, since its group is no longer usable; those after it go on in fresh ones.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import closeranks
from tests.parity.cases import CASES, Case
from tests.parity.compare import differences
from tests.parity.models import MODELS
from tests.parity.training import (
    EXCHANGES,
    STEPS,
    Average,
    Naive,
    Replica,
    Trace,
    Wrapped,
    train,
)
from tests.ranks import Outcome, try_ranks

Wrapper = Callable[..., Any]
Twins = dict[tuple[object, ...], Trace]
_GROUP_TIMEOUT_S = 20.0
TEST_TIMEOUT_S = 300  # the first test of a world size runs all of its cases
_BUDGET_S = 240.0


_WEIGHTS_BY_SIZE: dict[int, tuple[tuple[float, ...], ...]] = {
    1: ((2.0,), (1.0,), (0.5,)),
    2: ((1.0, 3.0), (2.0, 2.0), (0.0, 4.0), (1.5, 0.5)),
    3: ((1.0, 3.0, 1.0), (2.0, 0.0, 5.0), (1.0, 1.0, 0.5)),
    4: ((1.0, 3.0, 1.0, 2.0), (2.0, 0.0, 5.0, 1.0), (0.0, 1.0, 0.5, 0.0)),
}


class Weights:
    """This rank's weight for its k-th exchange; remembers how often it was asked.

    Up to two ranks the weights of an exchange sum to a power of two, so that dividing by it is
    exact and results can be compared bit by bit. Some are zero.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._values = [row[rank] for row in _WEIGHTS_BY_SIZE[size]]
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return self._values[(self.calls - 1) % len(self._values)]


@dataclass(frozen=True)
class Verdict:
    """What one rank saw of a case. `digests` are those of our replica, to be equal everywhere."""

    problems: list[str] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    raised: bool = False


def judge_cases(rank: int, names: Sequence[str], wrapper: Wrapper | None) -> list[Verdict]:
    """On a rank: judge the cases in turn, up to the first that raises."""
    verdicts: list[Verdict] = []
    twins: Twins = {}
    wrapper = wrapper or closeranks.DistributedDataParallel
    for name in names:
        try:
            verdicts.append(_judge(CASES[name], wrapper, twins))
        except Exception:  # noqa: BLE001 - whatever it is belongs into this case's verdict
            verdicts.append(Verdict([traceback.format_exc()], raised=True))
            break
    return verdicts


def _judge(case: Case, wrapper: Wrapper, twins: Twins) -> Verdict:
    """Train three times and hold our trace against the other two."""
    exact = case.is_exact(dist.get_world_size())
    # Ours.
    weights = _weights()
    module = _module(case)
    options = {**case.options, **case.module_options(module)}
    if case.average != "mean":
        options["average"] = _average(case, weights)
    ours = _train(case, Wrapped(wrapper, module, **options))
    problems = []
    if case.average == "weighted" and weights.calls != STEPS * EXCHANGES[case.schedule]:
        problems.append(f"the weight was asked for {weights.calls} times in {STEPS} steps")
    # The naive twin.
    found = differences(ours, _naive_trace(case, twins), exact, same_strides=False)
    problems += [f"against the naive twin, {problem}" for problem in found]
    # torch's class.
    if case.torch_is_oracle:
        module = _module(case)
        options = {**case.options, **case.module_options(module), **case.torch_options}
        torchs = _train(case, Wrapped(_torchs_class(case), module, **options))
        found = differences(ours, torchs, exact, same_strides=True)
        problems += [f"against torch's class, {problem}" for problem in found]
    return Verdict(problems, ours.digests)


def _torchs_class(case: Case) -> Wrapper:
    """torch's own exchange of sparse gradients reads freed memory and crashes about once in two
    thousand trainings. Its hook that does the same thing in Python does not."""
    if case.model != "sparse":
        return TorchDDP

    def hooked(module: nn.Module, **options: Any) -> Any:
        ddp = TorchDDP(module, **options)
        ddp.register_comm_hook(None, allreduce_hook)
        return ddp

    return hooked


def _naive_trace(case: Case, twins: Twins) -> Trace:
    """The naive twin's training. It has no options, so that cases which differ in them share it."""
    buffers = case.options.get("forward_sync_buffers", True)
    key = (case.model, case.schedule, case.optimizer, case.average, case.set_to_none, buffers)
    if key not in twins:
        twin = Naive(_module(case), _average(case, _weights()), buffers)
        twins[key] = _train(case, twin)
    return twins[key]


def _train(case: Case, replica: Replica) -> Trace:
    return train(replica, MODELS[case.model], case.schedule, case.optimizer, case.set_to_none)


def _weights() -> Weights:
    return Weights(dist.get_rank(), dist.get_world_size())


def _average(case: Case, weights: Weights) -> Average:
    return {"mean": True, "sum": False, "weighted": weights}[case.average]


def _module(case: Case) -> nn.Module:
    """A fresh module, with other weights on every rank."""
    torch.manual_seed(dist.get_rank())
    return MODELS[case.model].build()


def judge(size: int, names: Sequence[str], wrapper: Wrapper | None = None) -> dict[str, list[str]]:
    """The problems of each case with `size` ranks; no problems is an empty list."""
    problems: dict[str, list[str]] = {}
    started = time.monotonic()
    left = list(names)
    while left:
        if time.monotonic() - started > _BUDGET_S:
            return problems | {name: ["not run: earlier cases took too long"] for name in left}
        outcomes = try_ranks(
            size,
            judge_cases,
            left,
            wrapper,
            deadline_s=_BUDGET_S,
            group_timeout_s=_GROUP_TIMEOUT_S,
        )
        found = merge(left, outcomes)
        problems |= found
        left = left[len(found) :]
    return problems


def merge(names: Sequence[str], outcomes: Sequence[Outcome]) -> dict[str, list[str]]:
    """The problems of the first cases: up to and with the one that ended the ranks, if any did."""
    lost = [f"rank {o.rank} died, exit code {o.exitcode}\n{o.trace}" for o in outcomes if o.failed]
    heard: dict[int, list[Verdict]] = {o.rank: o.value for o in outcomes if not o.failed}
    # A rank that died left no word of where; the others raised in the same case.
    ends = [len(v) - 1 for v in heard.values() if v[-1].raised]
    last = min(ends, default=0 if lost else len(names) - 1)
    found = {}
    for i, name in enumerate(names[: last + 1]):
        by_rank = {rank: verdicts[i] for rank, verdicts in heard.items() if i < len(verdicts)}
        found[name] = [f"rank {r}: {p}" for r, v in by_rank.items() for p in v.problems]
        if i == last:
            found[name] += lost
        if len({tuple(verdict.digests) for verdict in by_rank.values()}) != 1:
            found[name].append("the ranks ended with different gradients or weights")
    return found
