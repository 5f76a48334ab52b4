"""The seam between the reducer and the ways to exchange: one protocol of five methods.

An exchange knows tensors and ranks. It must not know what a parameter, a bucket or a hook is.
All ranks call the same methods in the same order, wait() included; that order is the only thing
that pairs calls.

Below it is a second seam, `Between`: what an exchange whose ranks share hosts needs from whatever
carries flat tensors from host to host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from closeranks.exchange.layout import Layout


class Pending(Protocol):
    """An exchange under way. The tensor must not be touched before wait() has returned."""

    def wait(self) -> object:
        """Return when the tensor holds the result; raise RuntimeError if it never will."""


class WireState(Protocol):
    """What a rank has not sent yet, and where its wire format stands."""

    def state(self) -> dict[str, Any]:
        """A copy, on the CPU."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state() of the same rank."""


class Exchange(Protocol):
    """n ranks that reduce and broadcast tensors among themselves."""

    rank: int
    size: int

    @property
    def scales_for_free(self) -> bool:
        """Whether all_reduce multiplies by `scale` without a pass of its own."""

    @property
    def is_exact(self) -> bool:
        """Whether every sum is exact; if not, those are that come without a layout."""

    @property
    def wire_state(self) -> WireState | None:
        """What a wire format keeps from exchange to exchange; None where there is none."""

    @property
    def way(self) -> str:
        """Which way is used, in a few words, for `ddp.exchange` and the log."""

    def allocate(
        self, numels: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Flat zeroed tensors of these lengths that this exchange reduces as fast as it can."""

    def all_reduce(
        self, tensor: Tensor, scale: float = 1.0, layout: Layout | None = None
    ) -> Pending:
        """Start to replace the tensor by the sum over all ranks, times scale.

        Args:
            layout: what lies where in the tensor. Only a tensor that comes with one may lose
                precision on its way, and only where the user has asked for that.
        """

    def all_max(self, tensor: Tensor) -> Pending:
        """Start to replace the tensor by the element-wise maximum over all ranks."""

    def broadcast(self, tensor: Tensor, source: int) -> Pending:
        """Start to replace the tensor by the one of rank `source`."""

    def close(self) -> None:
        """This rank comes to no further collective; who waits for it may be told so."""


class Between(Protocol):
    """n ranks, one of each host, that sum flat tensors across hosts."""

    rank: int
    size: int
    is_exact: bool
    transport: str  # "gloo"

    @property
    def format(self) -> str:
        """How tensors travel: "float32" says that they travel as they are."""

    @property
    def wire_state(self) -> WireState | None:
        """What a wire format keeps from exchange to exchange; None where there is none."""

    def all_reduce(
        self, tensor: Tensor, scale: float = 1.0, layout: Layout | None = None
    ) -> Pending:
        """As Exchange.all_reduce. The result has the same bits on every host."""

    def close(self) -> None:
        """This rank comes to no further collective."""
