"""How several ranks' flat tensors become one: the operations of c10d, in the order of the tree.

Sums are the kernels' (C or Python, the same bits); an average is their sum, divided by the number
of ranks. The others are torch's own operations. Knows flat tensors; must not know where they lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from closeranks.exchange.purpose import FOLDS
from closeranks.segment.twin import combine

if TYPE_CHECKING:
    from closeranks.segment.twin import Combine, TwinKernels

FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
INTEGERS = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool})

_OPERATIONS: Mapping[str, Combine] = {
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def is_known(name: str, dtype: torch.dtype) -> bool:
    """Whether tensors of a type can be folded; what cannot is what gloo refuses as well."""
    if name in ("band", "bor", "bxor"):
        return dtype in INTEGERS
    return dtype in FLOATS or (name != "avg" and dtype in INTEGERS)


class Fold:
    """One operation for a group of so many ranks."""

    def __init__(self, kernels: TwinKernels, name: str, ranks: int) -> None:
        self.name = name
        self.number = FOLDS.index(name)
        self._kernels = kernels
        self._ranks = ranks
        # Times 1/n is division by n, to the bit, where n is a power of two.
        self._scale = 1 / ranks if name == "avg" and ranks & ranks - 1 == 0 else 1.0
        self._divides = name == "avg" and self._scale == 1.0

    def __call__(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Write the fold of the sources into every target; targets may be the sources."""
        if self.name not in ("sum", "avg"):
            combine(sources, targets, operation=_OPERATIONS[self.name])
        elif self._divides:
            self._kernels.fold(sources, targets[:1], 1.0)
            targets[0].div_(self._ranks)
            for target in targets[1:]:
                target.copy_(targets[0])
        else:
            self._kernels.fold(sources, targets, self._scale)
