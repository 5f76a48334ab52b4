"""What another process raised, out of a message that holds its traceback: pure."""

from closeranks.observe.embedded import unfold
from closeranks.observe.frames import Frame, worth_showing

TRACE = """Traceback (most recent call last):
  File "/x/site-packages/torch/worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)
           ^^^^^^^^^^^^^^^^^^^^
  File "/x/train.py", line 9, in __getitem__
    raise ValueError("bad image")
ValueError: bad image
and why
"""


def test_a_plain_message_stays_as_it_is() -> None:
    assert unfold("ValueError: x\n  y") == ("ValueError: x\n  y", "", [])


def test_a_loaders_message_is_taken_apart() -> None:
    message = f"ValueError: Caught ValueError in DataLoader worker process 1.\nOriginal {TRACE}"
    headline, cause, frames = unfold(message)
    assert headline == "ValueError: Caught ValueError in DataLoader worker process 1."
    assert cause == "ValueError: bad image\nand why"
    assert frames[-1] == Frame("/x/train.py", 9, "__getitem__") and len(frames) == 2


def test_the_innermost_of_several_tracebacks_counts() -> None:
    headline, cause, frames = unfold(f"A: one\n\n{TRACE}\nDuring that, another:\n\n{TRACE}")
    assert headline.startswith("A: one") and cause.startswith("ValueError: bad image")
    assert len(frames) == 2


def test_a_traceback_that_was_cut_off_has_no_cause() -> None:
    cut = TRACE[: TRACE.index("ValueError: bad image\nand")]
    assert unfold(f"A: one\n{cut}")[:2] == ("A: one", "")


def test_a_function_that_calls_itself_is_shown_once() -> None:
    again, last = Frame("/x/a.py", 3, "f"), Frame("/x/a.py", 9, "g")
    assert worth_showing([last, *[again] * 900, last], 5) == [last, again, last]
