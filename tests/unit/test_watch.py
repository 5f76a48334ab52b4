"""The watch over long waits: when it speaks, and that a process can end while it does."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from closeranks.observe.watch import Watch

# The farewell is in C++, and without Python's lock, when the main thread ends.
_ENDS_IN_A_FAREWELL = """
import datetime, threading
import torch.distributed as dist
from closeranks.observe.watch import Watch

store, inside = dist.HashStore(), threading.Event()

def farewell():
    inside.set()
    try:
        store.wait(["nobody sets it"], datetime.timedelta(seconds=1))
    except RuntimeError:
        print("said", flush=True)

watch = Watch(9.0, lambda: None, lambda what, waited_s: None, lambda: False, farewell)
watch.enter(lambda: "something")
watch.leave()
watch.close()
inside.wait()
"""


def test_a_process_ends_well_while_a_watch_says_farewell() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ENDS_IN_A_FAREWELL], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, "said\n"), done.stderr


def test_a_long_wait_is_told_once_and_goes_on() -> None:
    told: list[str] = []
    alarmed, over = threading.Event(), threading.Event()

    def alarm(what: str, waited_s: float) -> None:
        told.append(what)
        alarmed.set()

    watch = Watch(0.05, lambda: told.append("notice"), alarm, lambda: False, over.set)
    watch.enter(lambda: "a bucket")
    assert alarmed.wait(30.0)
    time.sleep(0.2)
    assert told == ["notice", "a bucket"]
    watch.leave()
    watch.close()
    assert over.wait(30.0), "the watch says farewell when it ends"
