"""How two traces differ, in words, and by how much they may.

With one or two ranks they may not: halving is exact, and a sum of two does not depend on its order.

With more, 1/n is rounded and the order of the sum is the reducer's own. In the first step both
started from equal weights, so a gradient of n summands is off by at most about n roundings of
eps/2 of the sum of their sizes; 8 eps of its norm (1e-6 in float32) allows for n = 4 and summands
that cancel to a quarter of their size. From then on the weights differ by such amounts, and the
model passes them on, mixed between its dtypes: later steps are held to 128 eps of the coarsest of
them (1.5e-5 in float32). The worst seen is 2.3 eps in the first step, 42 eps in the later ones,
of a transformer. For bfloat16 both are more than is needed, so nothing may be off by over 3 %.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.parity.training import Trace

FIRST_STEP_EPS = 8
LATER_STEPS_EPS = 128
MOST = 0.03


def differences(got: Trace, wanted: Trace, exact: bool, same_strides: bool) -> list[str]:
    """One sentence for each tensor of `got` that is not as in `wanted`; none if they agree."""
    return list(_differences(got, wanted, exact, same_strides))


def _differences(got: Trace, wanted: Trace, exact: bool, same_strides: bool) -> Iterator[str]:
    coarsest = max(torch.finfo(weight.dtype).eps for weight in wanted.weights.values())
    later = 0.0 if exact else min(LATER_STEPS_EPS * coarsest, MOST)
    assert len(got.steps) == len(wanted.steps), "trainings of different length"
    for number, (mine, theirs) in enumerate(zip(got.steps, wanted.steps, strict=True)):
        for name, gradient in mine.gradients.items():
            other = theirs.gradients[name]
            allowed = later
            if number == 0 and other is not None and not exact:
                allowed = min(FIRST_STEP_EPS * torch.finfo(other.dtype).eps, MOST)
            where = f"step {number}: gradient of {name}"
            yield from _difference(where, gradient, other, allowed)
            if same_strides and not _strides_agree(mine.strides[name], theirs.strides[name], other):
                yield f"{where} has strides {mine.strides[name]}, not {theirs.strides[name]}"
        for name, buffer in mine.buffers.items():
            where = f"step {number}: buffer {name}"
            yield from _difference(where, buffer, theirs.buffers[name], later)
    for name, weight in got.weights.items():
        yield from _difference(f"at the end: {name}", weight, wanted.weights[name], later)


def _difference(
    where: str, got: Tensor | None, wanted: Tensor | None, allowed: float
) -> Iterator[str]:
    if got is None or wanted is None:
        if got is not wanted:
            yield f"{where} is {_kind(got)}, not {_kind(wanted)}"
    elif got.dtype != wanted.dtype or got.shape != wanted.shape:
        yield f"{where} is {_kind(got)}, not {_kind(wanted)}"
    elif not torch.isfinite(got).all():
        yield f"{where} is not finite"
    elif not torch.equal(got, wanted):
        off = relative(got, wanted)
        if off > allowed:
            yield f"{where} is off by {off:.2e} of its norm, allowed {allowed:.2e}"


def relative(got: Tensor, wanted: Tensor) -> float:
    """The norm of the difference relative to the norm of what was wanted, in double precision."""
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    size = wanted.to(wide).norm().item()
    off = (got.to(wide) - wanted.to(wide)).norm().item()
    return off / size if size else float("inf")


def _kind(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def _strides_agree(
    mine: tuple[int, ...] | None, theirs: tuple[int, ...] | None, gradient: Tensor | None
) -> bool:
    """Dimensions of one element have no stride to speak of."""
    if mine is None or theirs is None or gradient is None:
        return mine == theirs
    pairs = zip(gradient.shape, mine, theirs, strict=True)
    return all(a == b for length, a, b in pairs if length > 1)
