"""What is said of a failure: the report, with what became of the others and where the logs are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from closeranks.launch.channel import Message
from closeranks.launch.folder import JobFolder
from closeranks.launch.record import Worker
from closeranks.observe.failure import Failure
from closeranks.observe.report import failure_report, outcome, ranks_named

OF_STARTER = "the process that workers are forked from died; --no-fork does without"


def workers_counted(count: int) -> str:
    return f"{count} worker{'s' if count != 1 else ''}"


def of_failure(culprit: Failure, became: str, folder: JobFolder) -> str:
    log = f"Logs: {folder.shown()}/rank-{culprit.rank}.log and its neighbours."
    return failure_report(culprit, became, log, str(Path.cwd()))


def of_others(
    culprit: Failure, failed_count: int, stopped_count: int, workers: Sequence[Worker]
) -> str:
    """What became of them; `failed_count` of all ranks have failed, the culprit included."""
    text = outcome(failed_count - 1, stopped_count)
    told = {w.rank: w.ended for w in workers if w.ended is not None}
    gone = [r for r, end in told.items() if not end["code"] and end["at_s"] < culprit.at_s]
    if culprit.is_consequence and gone:
        text += f" Before it, {ranks_named(gone)} had ended with exit code 0: out of data?"
    return text


def of_peer(message: Message, alive_count: int) -> str:
    """The job has ended on another machine."""
    why = message.get("why") or f"the launcher of machine {message.get('node')} has gone"
    return f"{why}; stopping {workers_counted(alive_count)} here"
