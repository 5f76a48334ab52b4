"""A module wide enough for every wire format, and how near its gradients must come to the mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.process.reference import assert_replicas_equal, rows

FORMATS = ("bf16", "fp16", "int8", "powersgd:2")


class Wide(nn.Module):
    """Matrices that PowerSGD compresses, blocks across parameters, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(20, 50)
        self.middle = nn.Linear(50, 40)
        self.unused = nn.Linear(30, 30)
        self.last = nn.Linear(40, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def step_of(net: nn.Module, rank: int, step: int) -> None:
    net(rows(rank, step, 16, 20)).square().mean().backward()


# How far from the mean a gradient may be, as a fraction of the largest; PowerSGD promises nothing
# of a single step.
NEAR = {"bf16": 0.01, "fp16": 0.001, "int8": 0.02}


def near(net: Any, expected: dict[str, Tensor | None], form: str) -> None:
    assert_replicas_equal([p.grad for p in net.module.parameters()])
    for name, p in net.module.named_parameters():
        wanted = expected[name]
        assert (p.grad is None) == (wanted is None), f"{name}: {p.grad} and {wanted}"
        if wanted is None or form not in NEAR:
            continue
        largest = max(float(g.abs().max()) for g in expected.values() if g is not None)
        assert (p.grad - wanted).abs().max() <= NEAR[form] * largest, name
