"""The naive twin against sums made by hand, so that what measures the others is measured itself.

Every rank computes the gradients of all ranks on its own, which needs no exchange at all.
"""

from __future__ import annotations

import copy

import pytest
import torch

from closeranks.reducer.naive import NaiveReducer
from tests.parity.compare import relative
from tests.parity.models import Model, Place, mlp
from tests.parity.runs import Weights
from tests.ranks import run_ranks

SIZE = 3
# Two exchanges, each of a local and a synchronised backward. How .grad is made from them:
#   mean      all of it is averaged each time, so what was averaged stays what it was
#   others    what was exchanged is added to what is exchanged next
MODEL = Model(
    build=mlp,
    inputs=lambda place: (torch.randn(4, 6, generator=place.generator()),),
    loss=lambda output: (output - 1.0).square().mean(),
)


def _own_gradients(module: torch.nn.Module, rank: int, exchange: int) -> list[torch.Tensor]:
    """What a rank brings to an exchange."""
    places = [Place(rank, SIZE, exchange, micro) for micro in range(2)]
    loss = sum(MODEL.loss(module(*MODEL.inputs(place))) for place in places)
    return list(torch.autograd.grad(loss, list(module.parameters())))


def _worst_error(rank: int, kind: str) -> float:
    """Of any gradient after any of two exchanges, relative to its norm."""
    module = MODEL.build()  # the ranks' seeds are equal, and so are their weights
    other = copy.deepcopy(module)  # whose gradients are computed without the twin seeing it
    average = {"mean": True, "sum": False, "weighted": Weights(rank, SIZE)}[kind]
    naive = NaiveReducer(module.parameters(), average=average)
    wanted = [torch.zeros_like(parameter) for parameter in module.parameters()]
    weights = [Weights(r, SIZE) for r in range(SIZE)]
    errors = []
    for exchange in range(2):
        shares = {"mean": [1 / SIZE] * SIZE, "sum": [1.0] * SIZE}.get(kind)
        if shares is None:
            asked = [weight() for weight in weights]
            shares = [weight / sum(asked) for weight in asked]
        for share, r in zip(shares, range(SIZE), strict=True):
            for total, own in zip(wanted, _own_gradients(other, r, exchange), strict=True):
                total.add_(own * share)
        for micro in range(2):
            loss = MODEL.loss(module(*MODEL.inputs(Place(rank, SIZE, exchange, micro))))
            if micro == 0:
                loss.backward()
            else:
                with naive.exchange():
                    loss.backward()
        for parameter, total in zip(module.parameters(), wanted, strict=True):
            assert parameter.grad is not None
            errors.append(relative(parameter.grad, total))
    return max(errors)


@pytest.mark.parametrize("kind", ["mean", "sum", "weighted"])
def test_its_gradients_are_those_made_by_hand(kind: str) -> None:
    assert max(run_ranks(SIZE, _worst_error, kind)) < 1e-6
