"""What was not sent, kept for the next time: one float32 number for each element of a gradient.

Every lossy format adds the residual to what it encodes and leaves in it what the encoding does not
hold, so that nothing is lost for good, only late. Residuals belong to named pieces: when pieces are
put together differently, or travel in another format, they follow.

Knows names, places and sizes; must not know formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Place = tuple[str, int, int]  # name, start, numel


class Residuals:
    """The residuals of one rank."""

    def __init__(self) -> None:
        self._flats: dict[tuple[Place, ...], Tensor] = {}
        self._pieces: dict[str, Tensor] = {}  # views of the flats, or tensors that wait for one

    def flat(self, places: tuple[Place, ...], device: torch.device) -> Tensor:
        """The residual of a flat tensor that is put together like this; to be written to."""
        found = self._flats.get(places)
        if found is not None:
            return found
        numel = max((start + count for _, start, count in places), default=0)
        made = torch.zeros(numel, dtype=torch.float32, device=device)
        for name, start, count in places:
            view, old = made[start : start + count], self._pieces.get(name)
            if old is not None and old.numel() == count:
                view.copy_(old)
            self._pieces[name] = view
        self._let_go({name for name, _, _ in places})
        self._flats[places] = made
        return made

    def knows(self, places: Sequence[Place]) -> bool:
        """Whether there may be something that was not sent."""
        return any(name in self._pieces for name, _, _ in places)

    def forget(self, places: tuple[Place, ...]) -> None:
        """Everything has been sent."""
        self._let_go({name for name, _, _ in places})
        for name, _, _ in places:
            self._pieces.pop(name, None)

    def _let_go(self, names: set[str]) -> None:
        """These pieces lie elsewhere now; the others of their flats do not keep the memory."""
        for places in list(self._flats):
            if names.isdisjoint(name for name, _, _ in places):
                continue
            del self._flats[places]
            for name, _, _ in places:
                if name not in names:
                    self._pieces[name] = self._pieces[name].clone()

    def state(self) -> dict[str, Tensor]:
        """A copy of everything, by name."""
        return {name: piece.cpu().clone() for name, piece in self._pieces.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state()."""
        self._flats = {}
        self._pieces = {name: piece.detach().clone().flatten() for name, piece in state.items()}
