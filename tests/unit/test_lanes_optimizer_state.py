"""State that is created early is what torch's optimizers would have begun with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from closeranks.checkpoint.format import digest
from closeranks.lanes.optimizer_state import create

MAKERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
}
EARLY = set(MAKERS) - {"SGD", "momentum"}  # the first momentum of SGD is its first gradient


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    return digest({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})


@pytest.mark.parametrize("name", MAKERS)
def test_steps_after_it_have_the_same_bits(name: str) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(4, 3)
    model = copy.deepcopy(plain)
    optimizer = MAKERS[name](model.parameters())
    before = digest(dict(model.state_dict()))
    create(optimizer)
    assert digest(dict(model.state_dict())) == before
    assert all(p.grad is None for p in model.parameters())
    assert bool(optimizer.state) == (name in EARLY)
    assert train(model, optimizer) == train(plain, MAKERS[name](plain.parameters()))


def test_what_is_there_stays() -> None:
    model = nn.Linear(4, 3)
    model.weight.grad = torch.ones(3, 4)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    train(model, optimizer)
    before = digest(optimizer.state_dict())
    create(optimizer)
    assert digest(optimizer.state_dict()) == before


def test_hooks_and_schedulers_do_not_notice() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    called: list[str] = []
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    before = scheduler.state_dict()
    create(optimizer)
    assert called == [] and scheduler.state_dict() == before
    assert not getattr(optimizer, "_opt_called", False)


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        raise AssertionError("a step of somebody else's optimizer is not tried")


def test_others_are_left_alone() -> None:
    create(Lion(nn.Linear(2, 2).parameters()))
