"""Collects what a test makes the program say: warnings, and log records of closeranks."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def noticed() -> Iterator[list[str]]:
    """Collects what is said while in here, be it a warning or a log record of ours."""
    said: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Collect()
    log = logging.getLogger("closeranks")
    log.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
        said.extend(str(w.message) for w in caught)
    finally:
        log.removeHandler(handler)
