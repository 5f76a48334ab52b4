"""Counts and times of one reducer, for its logging data and its pictures. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from closeranks.observe import whereabouts
from closeranks.observe.spans import Spans, clock_ns


@dataclass
class Stats:
    """Times are of the newest iteration, on the clock of this process; sums are of all."""

    iterations: int = 0  # synchronised backwards
    buckets_reduced: int = 0  # in the newest of them
    forward_start_ns: int = 0
    backward_start_ns: int = 0
    backward_end_ns: int = 0
    exchange_start_ns: int = 0
    exchange_end_ns: int = 0
    sums_ns: dict[str, int] = field(default_factory=dict)
    spans: Spans = field(default_factory=Spans)
    traces: bool = False  # note the true ends of exchanges, at the cost of a callback each

    def forward_began(self) -> None:
        self.forward_start_ns = clock_ns()
        whereabouts.enter("forward")

    def backward_began(self) -> None:
        self.backward_start_ns = clock_ns()
        whereabouts.enter("backward")
        self.exchange_start_ns = self.exchange_end_ns = 0
        self.buckets_reduced = 0

    def bucket_landed(self, position: int, start_ns: int, end_ns: int) -> None:
        self.exchange_start_ns = self.exchange_start_ns or start_ns
        self.exchange_end_ns = end_ns
        self.buckets_reduced += 1
        self.spans.add(f"exchange bucket {position}", start_ns, end_ns)

    def backward_ended(self, compute_end_ns: int) -> None:
        """The gradients were all there at compute_end_ns; now they are exchanged as well."""
        self.iterations += 1
        self.backward_end_ns = compute_end_ns
        whereabouts.enter("after backward")
        self.spans.add("backward", self.backward_start_ns, compute_end_ns)
        for name, value in self.times_ns().items():
            self.sums_ns[name] = self.sums_ns.get(name, 0) + value

    def times_ns(self) -> dict[str, int]:
        """How long the parts of the newest iteration took, by torch's names for them."""
        end_ns = self.exchange_end_ns or self.backward_end_ns
        overlap_ns = min(end_ns, self.backward_end_ns) - (self.exchange_start_ns or end_ns)
        return {
            "forward_compute_time": max(0, self.backward_start_ns - self.forward_start_ns)
            if self.forward_start_ns
            else 0,
            "backward_compute_time": self.backward_end_ns - self.backward_start_ns,
            "backward_comm_time": max(0, self.exchange_end_ns - self.exchange_start_ns),
            "backward_compute_comm_overlap_time": max(0, overlap_ns),
        }
