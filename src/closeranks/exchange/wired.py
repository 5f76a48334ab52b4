"""The exchange over a process group whose gradients travel in a wire format.

It is an Exchange of its own, and a Between for ranks that share hosts. Only tensors that come with
a layout are encoded, and of those only long ones of a float type that becomes shorter; everything
else is summed by the group as it is.

A reduction has three stages: the first collectives set off; they have arrived, and the second ones
set off (for two ranks and an elementwise format there are none); the result is there. Nothing runs
in the background: a stage is entered when something is asked of the exchange.

All ranks must start the collectives of a group in the same order. First ones set off in the order
of calls, and second ones in the order of reductions; how these meet depends on what has arrived
when, so second ones have a group of their own. Where none can be made, they are started only at
moments that are the same on every rank, whatever has arrived: two reductions later, or when
somebody waits.

    encoded    elementwise formats: their reduction
    factored   PowerSGD: its reduction
    auto       which format, where the user leaves that to us
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from closeranks.exchange.auto import Auto
from closeranks.exchange.encoded import Encoded, Workspaces
from closeranks.exchange.factored import Factored
from closeranks.exchange.group import GroupExchange
from closeranks.wire.feedback import Residuals
from closeranks.wire.formats import AUTO, EXACT, Format
from closeranks.wire.powersgd import PowerSgd

if TYPE_CHECKING:
    from closeranks.exchange.base import Pending
    from closeranks.exchange.layout import Layout

logger = logging.getLogger("closeranks")

_NUMEL_MIN = 1024  # shorter tensors cost a message, whatever their length
_LAG = 2  # so many reductions later one enters its second stage
_HALVES = (torch.bfloat16, torch.float16)


class WiredExchange:
    """n ranks of one process group."""

    scales_for_free = True
    is_exact = False

    def __init__(
        self, group: GroupExchange, wanted: Format, turns: GroupExchange | None = None
    ) -> None:
        """`turns` is a second group of the same ranks, used by nobody else."""
        self.rank, self.size = group.rank, group.size
        self.transport = group.transport
        self.group = group
        self.turns = turns or group
        self._looks = turns is not None  # whether stages may depend on what has arrived
        self.wanted = wanted
        self.residuals = Residuals()
        self._powersgd: dict[int, PowerSgd] = {}  # by rank of the matrices
        self._workspaces = Workspaces(group)
        self._auto = Auto(group) if wanted.name == AUTO else None
        self._flying: deque[Reduction] = deque()
        _close_at_exit(self)

    @property
    def format(self) -> str:
        """How gradients travel, in a word."""
        if self._auto is None:
            return str(self.wanted)
        return f"auto: {self._auto.words}"

    @property
    def wire_state(self) -> WiredExchange:
        return self

    @property
    def way(self) -> str:
        return f"{self.group.way}, {self.format}"

    def allocate(
        self, numels: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        return self.group.allocate(numels, dtype, device)

    def all_reduce(
        self, tensor: Tensor, scale: float = 1.0, layout: Layout | None = None
    ) -> Pending:
        if layout is None or not _may_lose(tensor):
            return self.group.all_reduce(tensor, scale)
        assert layout.numel == tensor.numel(), "a layout tells of every element"
        chosen = self._format_now(tensor, layout)
        if chosen.name in ("bf16", "fp16") and tensor.dtype in _HALVES:
            return self.group.all_reduce(tensor, scale)
        if chosen.name == EXACT:
            return self._all_reduce_exactly(tensor, scale, layout)
        return self._launch(Reduction(self, tensor, scale, layout, chosen))

    def all_max(self, tensor: Tensor) -> Pending:
        return self.group.all_max(tensor)

    def broadcast(self, tensor: Tensor, source: int) -> Pending:
        return self.group.broadcast(tensor, source)

    def close(self) -> None:
        self.group.close()
        self.turns = self.group  # What was made for us ends with us.
        self._looks = False

    @property
    def workspaces(self) -> Workspaces:
        return self._workspaces

    def _format_now(self, tensor: Tensor, layout: Layout) -> Format:
        if self._auto is None:
            return self.wanted
        return self._auto.format_for(tensor, layout)

    def _all_reduce_exactly(self, tensor: Tensor, scale: float, layout: Layout) -> Pending:
        """Lossy formats may have left something here."""
        if self.residuals.knows(layout.places):
            tensor.add_(self.residuals.flat(layout.places, tensor.device))
            self.residuals.forget(layout.places)
        return self.group.all_reduce(tensor, scale)

    def powersgd(self, rank: int) -> PowerSgd:
        return self._powersgd.setdefault(rank, PowerSgd(rank))

    # Stages.

    def _launch(self, reduction: Reduction) -> Reduction:
        self._flying.append(reduction)
        reduction.enter(1)
        if not self._looks and len(self._flying) > _LAG:
            self._flying[-1 - _LAG].enter(2)
        self.look()
        return reduction

    def look(self) -> None:
        """Enter the second stage of what has arrived, in order."""
        for reduction in self._flying if self._looks else ():
            if reduction.stage == 1 and not reduction.has_arrived():
                break
            reduction.enter(2)

    def finish(self, reduction: Reduction) -> None:
        """Bring a reduction to its end, and the next one to its second stage meanwhile.

        Only what was asked for before is waited for: between hosts the others may not come to a
        later reduction before this one has landed with them.
        """
        place = self._flying.index(reduction)
        for other in list(self._flying)[: place + (1 if self._looks else 2)]:
            other.enter(2)
        self.look()
        reduction.enter(3)
        self._flying.remove(reduction)

    # What a resumed run needs.

    def state(self) -> dict[str, Any]:
        """What this rank has not sent yet, and where formats stand. A copy, on the CPU."""
        return {
            "residuals": self.residuals.state(),
            "powersgd": {
                rank: {name: q.cpu().clone() for name, q in each.qs.items()}
                for rank, each in self._powersgd.items()
            },
            "auto": None if self._auto is None else self._auto.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state() of the same rank."""
        assert not self._flying, "state is loaded between exchanges"
        self.residuals.load(state["residuals"])
        self._powersgd = {}
        for rank, qs in state["powersgd"].items():
            self.powersgd(int(rank)).qs = {name: q.detach().clone() for name, q in qs.items()}
        if self._auto is not None and state["auto"] is not None:
            self._auto.load_state(state["auto"])


class Reduction:
    """One all-reduce in a lossy format, on its way through its stages."""

    def __init__(
        self,
        exchange: WiredExchange,
        tensor: Tensor,
        scale: float,
        layout: Layout,
        chosen: Format,
    ) -> None:
        self._exchange = exchange
        self._tensor = tensor
        self._values = tensor if tensor.dtype is torch.float32 else tensor.float()
        self.stage = 0
        self._error: RuntimeError | None = None
        residual = exchange.residuals.flat(layout.places, tensor.device)
        job: Encoded | Factored
        if chosen.name == "powersgd":
            by = exchange.powersgd(chosen.rank)
            groups = exchange.group, exchange.turns
            job = Factored(groups, by, layout, self._values, residual, scale)
        else:
            workspace = exchange.workspaces.take(chosen.name, self._values)
            groups = exchange.group, exchange.turns
            job = Encoded(groups, workspace, self._values, residual, scale)
        self._job = job
        self._steps: tuple[Callable[[], None], ...] = (job.start, job.turn, job.end)

    def enter(self, stage: int) -> None:
        """Go on until a stage; an error is kept for whoever waits."""
        while self.stage < stage and self._error is None:
            try:
                self._steps[self.stage]()
            except RuntimeError as error:
                self._error = error
            self.stage += 1

    def has_arrived(self) -> bool:
        """Whether the next stage can be entered without waiting."""
        return self._error is not None or all(work.is_completed() for work in self._job.works)

    def is_completed(self) -> bool:
        """Whether wait() will return without waiting for others."""
        self._exchange.look()
        return self.stage >= len(self._steps) or (self.stage == 2 and self.has_arrived())

    def wait(self) -> None:
        if self.stage < len(self._steps):
            self._exchange.finish(self)
            if self._error is not None:
                raise self._error
            if self._values is not self._tensor:
                self._tensor.copy_(self._values)


_here: weakref.WeakSet[WiredExchange] = weakref.WeakSet()


def _close_at_exit(exchange: WiredExchange) -> None:
    """Gloo's groups have to end before the interpreter does."""
    if not _here:
        atexit.register(_close_all)
    _here.add(exchange)


def _close_all() -> None:
    for exchange in list(_here):
        exchange.close()


def _may_lose(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.numel() < _NUMEL_MIN:
        return False
    return tensor.dtype is torch.float32 or tensor.dtype in _HALVES
