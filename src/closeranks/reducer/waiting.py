"""Waits for exchanges, tells when one takes too long, and explains the one that failed.

Translates the errors of a process group once, here, into the tree of closeranks.errors. Knows
exchanges by number and description; must not know buckets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from closeranks.errors import ExchangeFailed, OutOfData, PeerLost, RankAbsent
from closeranks.observe.watch import Watch

if TYPE_CHECKING:
    from closeranks.exchange.attendance import Attendance, Report
    from closeranks.exchange.base import Pending

logger = logging.getLogger("closeranks")

_USE_JOIN = "If it ran out of data, wrap the training loop of every rank in `with ddp.join():`"
_LOOK = "Look at its output and its stack (`py-spy dump --pid PID`)"


class Waiter:
    """Waits on behalf of one reducer."""

    def __init__(self, attendance: Attendance, warn_after_s: float) -> None:
        self.attendance = attendance
        self.exchange_number = 0  # of the exchange under way or the last one
        self.at_end: Callable[[], None] = lambda: None  # called when no more waits will come
        self._watch = Watch(
            warn_after_s, self._leave_note, self._warn, attendance.is_over, self._say_goodbye
        )

    def wait(self, pending: Pending, what: Callable[[], str]) -> None:
        """Return when it has ended well; otherwise say who did not come, and to what."""
        self._watch.enter(what)
        try:
            pending.wait()
        except RuntimeError as error:
            raise self._explain(error, what()) from error
        finally:
            self._watch.leave()

    def close(self) -> None:
        """No more exchanges from here: others who still wait learn it from the watch's end."""
        self._watch.close()

    def _say_goodbye(self) -> None:
        self.attendance.leave()
        self.at_end()

    def _leave_note(self) -> None:
        self.attendance.wait_in(self.exchange_number)

    def _warn(self, what: str, waited_s: float) -> None:
        report = self.attendance.ask(self.exchange_number, answer_s=0.3)
        if report is None:
            who = "this group has no store, so who is missing is not known"
        else:
            who = report.sentence()
        logger.warning(
            "%s: %s, for %.1f s now. The wait goes on until the group's timeout. %s.",
            what,
            who,
            waited_s,
            _LOOK,
        )

    def _explain(self, error: RuntimeError, what: str) -> ExchangeFailed:
        if isinstance(error, PeerLost) and error.rank is not None:
            return self._explain_lost(error, error.rank, what)
        if isinstance(error, RankAbsent):  # The exchange itself saw who is absent, and how.
            return RankAbsent(
                f"{what}: {error}. Training cannot go on in this process group. {_LOOK}. "
                f"{_USE_JOIN}."
            )
        report = self.attendance.ask(self.exchange_number)
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        ended = "Training cannot go on in this process group"
        if report is None and _timed_out(cause):  # The store ended with a rank that gave up first.
            return RankAbsent(f"{what}: {cause}. {ended}. {_LOOK}. {_USE_JOIN}.")
        if report is None or not report.absent:
            return ExchangeFailed(
                f"{what}: the process group reports: {cause}. {ended}; restart the job."
            )
        who = report.sentence()
        if report.left:
            return OutOfData(
                f"{what}: {who}, and will not come: it ran out of data, or ended its loop early. "
                f"{ended}. {_USE_JOIN}, or give every rank the same number of batches "
                f"(DistributedSampler does). The cause: {cause}."
            )
        if _timed_out(cause):
            return RankAbsent(
                f"{what}: {who}, until the group's timeout. {ended}. {_LOOK}. {_USE_JOIN}. "
                f"The cause: {cause}."
            )
        return PeerLost(
            f"{what}: {who}, and a connection is gone: {_names(report)} most likely died. {ended}; "
            f"look at the end of its output, then restart the job. The process group reports: "
            f"{cause}."
        )

    def _explain_lost(self, error: PeerLost, rank: int, what: str) -> ExchangeFailed:
        """The exchange itself saw a rank go, so nobody is asked and no time is lost."""
        if not error.is_silent and self.attendance.has_left(rank):
            return OutOfData(
                f"{what}: {error}; it left training in an orderly way, so it ran out of data or "
                f"ended its loop early. Training cannot go on in this process group. {_USE_JOIN}, "
                "or give every rank the same number of batches (DistributedSampler does)."
            )
        look = f"look at the end of rank {rank}'s output"
        if error.is_silent:
            look = "look at that machine and at the network"
        return PeerLost(
            f"{what}: {error}. Training cannot go on in this process group; {look}, then restart "
            "the job.",
            rank,
            error.host,
            error.is_silent,
        )


def _timed_out(cause: str) -> bool:
    return "timed out" in cause.lower() or "timeout" in cause.lower()


def _names(report: Report) -> str:
    return ", ".join(f"rank {rank}" for rank in report.absent)
