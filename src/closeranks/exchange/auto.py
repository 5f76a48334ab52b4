"""Which format each gradient travels in, where the user leaves that to us: wire="auto".

The link and the formats are measured when the first gradient sets off, and the link again every so
many exchanges; if it has drifted, everything is measured and chosen anew. All measurements are
maxima over ranks, so that all choose alike. What is chosen from them is decided in wire/choose.

Only formats with which small networks end where exact ones do (bench/convergence.py) may be chosen.
PowerSGD sends least, but with rank 4 it does not, so it has to be asked for.

A small bucket may travel exactly where a large one is worth encoding: each layout has a choice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from closeranks.exchange.encoded import Workspaces
from closeranks.wire import choose
from closeranks.wire.formats import EXACT, Format, parse

if TYPE_CHECKING:
    from closeranks.exchange.group import GroupExchange
    from closeranks.exchange.layout import Layout
    from closeranks.wire.codec import Codec

logger = logging.getLogger("closeranks")

# What may be chosen; each loses more than the one before it.
CANDIDATES = ("bf16", "int8")
LOOK_EVERY = 200  # exchanges between two looks at the link
_PROBE_S_MIN = 0.05  # shorter probes measure a switch's buffer and not its speed
_PROBE_NUMEL_MIN, _PROBE_NUMEL_MAX = 1 << 15, 1 << 21
_SAMPLE_NUMEL = 1 << 19  # elements on which formats are timed
_HALVES = (torch.bfloat16, torch.float16)


class Auto:
    """The choices of one rank, which are those of all."""

    def __init__(self, group: GroupExchange) -> None:
        self._group = group
        self._link: choose.Link | None = None
        self._work_s: dict[str, float] = {}  # per element
        self._choices: dict[Layout, choose.Choice] = {}
        self._seen: set[Layout] = set()  # in the exchange under way
        self._exchanges = 0
        self._probe_numel = _PROBE_NUMEL_MIN
        self._told = ""

    @property
    def words(self) -> str:
        """The format of the largest layout."""
        if not self._choices:
            return "not measured yet"
        return self._choices[max(self._choices, key=lambda layout: layout.numel)].name

    def format_for(self, tensor: Tensor, layout: Layout) -> Format:
        """The format of a tensor. A layout that comes again begins another exchange."""
        if layout in self._seen or not self._exchanges:
            self._seen.clear()
            self._exchanges += 1
            if self._link is None or not self._work_s:
                self._measure(tensor.device)
            elif self._exchanges % LOOK_EVERY == 0:
                self._look(tensor.device)
        self._seen.add(layout)
        if layout not in self._choices:
            self._choices[layout] = self._choose(tensor, layout)
        return parse(self._choices[layout].name)

    def _choose(self, tensor: Tensor, layout: Layout) -> choose.Choice:
        if self._link is None:  # A state was loaded for another model, or none was.
            return choose.Choice(EXACT, "nothing has been measured")
        choice = choose.choose(self._candidates(tensor), self._link)
        if choice.name != self._told:
            self._told = choice.name
            if self._group.rank == 0:
                megabytes = tensor.numel() * tensor.element_size() / 1e6
                logger.info("wire auto: %s for %.1f MB: %s", choice.name, megabytes, choice.reason)
        return choice

    def _candidates(self, tensor: Tensor) -> list[choose.Candidate]:
        size, numel = self._group.size, tensor.numel()
        ring = 2 * (size - 1) / size
        exact_bytes = ring * numel * tensor.element_size()
        found = [choose.Candidate(EXACT, exact_bytes, 1, 0.0)]
        for name in CANDIDATES:
            work_s = self._work_s[name] * numel
            if name != "bf16" or tensor.dtype not in _HALVES:
                codec = Workspaces(self._group).codec(name, tensor.device)
                sent = (1 if size == 2 else ring) * codec.bytes_for(numel)
                found.append(choose.Candidate(name, sent, 1 if size == 2 else 2, work_s))
        return found

    # Measurements; collectives, so all ranks come to them alike.

    def _measure(self, device: torch.device) -> None:
        tries = [self._collective(1, device) for _ in range(4)]
        latency_s = self._agree(min(tries[1:]), device)
        self._probe_numel = _PROBE_NUMEL_MIN
        seconds = self._probe(device)
        while seconds < _PROBE_S_MIN and self._probe_numel < _PROBE_NUMEL_MAX:
            self._probe_numel *= 4
            seconds = self._probe(device)
        self._link = choose.Link(latency_s, self._rate(seconds, latency_s))
        for name in CANDIDATES:
            work_s = min(self._work(name, device) for _ in range(2))
            self._work_s[name] = self._agree(work_s, device)
        self._choices = {}

    def _look(self, device: torch.device) -> None:
        """Has the link drifted?"""
        assert self._link is not None, "a link is measured before it is looked at"
        rate = self._rate(self._probe(device), self._link.latency_s)
        now = choose.Link(self._link.latency_s, rate)
        if choose.has_drifted(self._link, now):
            self._measure(device)

    def _probe(self, device: torch.device) -> float:
        return self._agree(self._collective(self._probe_numel, device), device)

    def _rate(self, seconds: float, latency_s: float) -> float:
        size = self._group.size
        sent = 2 * (size - 1) / size * 4 * self._probe_numel
        return sent / max(seconds - latency_s, 1e-6)

    def _collective(self, numel: int, device: torch.device) -> float:
        """How long a sum over ranks takes that all begin together."""
        self._sum(torch.zeros(1, device=device))
        tensor = torch.zeros(numel, device=device)
        return _timed(lambda: self._sum(tensor), device)

    def _sum(self, tensor: Tensor) -> None:
        self._group.all_reduce(tensor).wait()

    def _agree(self, seconds: float, device: torch.device) -> float:
        """What the slowest rank says."""
        answer = torch.tensor([seconds], dtype=torch.float64, device=device)
        self._group.all_max(answer).wait()
        return float(answer.item())

    def _work(self, name: str, device: torch.device) -> float:
        """How long encoding and decoding take for an element."""
        # Not random: the user's random numbers are to be the same with and without us.
        values = torch.arange(_SAMPLE_NUMEL, dtype=torch.float32, device=device).sin_()
        residual = torch.zeros_like(values)
        codec = Workspaces(self._group).codec(name, device)
        run = _codec_run(codec, self._group.size, values, residual)
        run()
        return _timed(run, device) / _SAMPLE_NUMEL

    # What a resumed run needs.

    def state(self) -> dict[str, Any]:
        """The measurements, so that a resumed run chooses as this one did."""
        link = self._link
        return {
            "link": None if link is None else [link.latency_s, link.bytes_per_s],
            "work_s": dict(self._work_s),
            "exchanges": self._exchanges,
            "probe_numel": self._probe_numel,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        link = state["link"]
        self._link = None if link is None else choose.Link(*link)
        self._work_s = dict(state["work_s"])
        self._exchanges, self._probe_numel = state["exchanges"], state["probe_numel"]
        self._choices = {}


def _codec_run(codec: Codec, ranks: int, values: Tensor, residual: Tensor) -> Callable[[], None]:
    """What a rank does for its tensor: with more than two ranks, for the second encoding too."""
    out = values.new_zeros(codec.bytes_for(values.numel()), dtype=torch.uint8)
    result = torch.empty_like(values)

    def run() -> None:
        codec.encode(values, residual, out)
        codec.sum([out, out], result, 1.0)
        if ranks > 2:
            codec.sum([out], result, 1.0)

    return run


def _timed(run: Callable[[], None], device: torch.device) -> float:
    settle = torch.cuda.synchronize if device.type == "cuda" else _nothing
    settle()
    start = time.perf_counter()
    run()
    settle()
    return time.perf_counter() - start


def _nothing() -> None:
    """The CPU has done what was asked when the call returns."""
