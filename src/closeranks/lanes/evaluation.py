"""Sums over a dataset: batches are pieces that anybody may compute, added up in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from closeranks.checkpoint.format import decode, encode
from closeranks.lanes.data import Source
from closeranks.lanes.script import Script
from closeranks.lanes.seeds import derive, seed_all

_BATCHES_AT_ONCE = 64


class Evaluation:
    """One call of evaluate(), as one worker goes through it."""

    def __init__(self, script: Script, source: Source, fn: Callable[[Any], dict[str, Any]]) -> None:
        self.script = script
        self.worker = script.worker
        self.source = source
        self.fn = fn
        self.batches = source.batches(0)

    def run(self) -> dict[str, Any]:
        if self.script.loop is not None:
            return self._run_inside(f"evaluate() in {self.script.loop}")
        call = self.script.next_call()
        place = f"evaluate() of call {call}"
        totals: dict[str, Any] = {}
        at = 0
        while True:
            inside = self.script.arrive(call, {"at": at, "totals": totals})
            if inside is None:
                totals = self.script.records[str(call)]
                break
            at, totals = inside["at"], inside["totals"]
            if at >= len(self.batches):
                self.script.records[str(call)] = totals
                self.script.complete(call)
                break
            totals, at = self._some(place, at, totals), at + _BATCHES_AT_ONCE
        seed_all(derive(self.worker.seed, "end", call))
        return _as_tensors(totals)

    def _run_inside(self, place: str) -> dict[str, Any]:
        totals: dict[str, Any] = {}
        for at in range(0, len(self.batches), _BATCHES_AT_ONCE):
            totals = self._some(place, at, totals)
        seed_all(derive(self.worker.seed, "end", place))
        return _as_tensors(totals)

    def _some(self, place: str, at: int, totals: dict[str, Any]) -> dict[str, Any]:
        """Add the next batches to the totals."""
        batches = self.batches[at : at + _BATCHES_AT_ONCE]

        def compute(piece: int) -> str:
            batch = self.source.fetch(0, batches[piece])
            seed_all(derive(self.worker.seed, place, at + piece))
            with torch.no_grad(), _evaluating(self.worker.prepared.modules):
                told = self.fn(batch)
            return encode({name: _plain(name, v) for name, v in told.items()}, "evaluate()")[0]

        texts = self.worker.pieces(f"{place}, batch {at}", len(batches), compute)
        totals = dict(totals)
        for text in texts:
            for name, value in decode(text, []).items():
                totals[name] = totals[name] + value if name in totals else value
        return totals


@contextmanager
def _evaluating(modules: list[torch.nn.Module]) -> Iterator[None]:
    """All modules in evaluation mode; afterwards each as it was."""
    training = [(m, m.training) for top in modules for m in top.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module, was in training:
            module.training = was


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return value.numpy() if value.dim() else value.item()
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int | float | np.generic | np.ndarray):
        return value
    raise TypeError(
        f"fn of evaluate() returned a {type(value).__name__} as {name!r}; wanted numbers or "
        "tensors, which can be added up. Training stopped; return a dict of those."
    )


def _as_tensors(totals: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.from_numpy(np.array(v)) if isinstance(v, np.ndarray) else v
        for name, v in totals.items()
    }
