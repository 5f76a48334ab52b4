"""Memory as it was before somebody died of it: pure, with a clock and readings of the test's."""

from closeranks.launch.machine import Memory
from closeranks.launch.pressure import Pressure

GB = 10**9


def _after(used: list[int], kills: list[int]) -> Pressure:
    """Looked at once a second; the last reading is made when the death has been noticed."""
    readings, counts = iter(used), iter(kills)
    pressure = Pressure(lambda: Memory(next(readings) * GB, 16 * GB), lambda: next(counts))
    for second in range(len(used)):
        pressure.look(float(second))
    return pressure


def test_what_is_free_again_is_told_as_it_was() -> None:
    assert _after([3, 5, 15, 4], kills=[0, 0]).shown() == "15.0 of 16.0 GB were in use"


def test_what_was_long_ago_is_not_told() -> None:
    assert _after([15, 3, 3, 3, 3, 3, 3, 4], kills=[0, 0]).shown() == "4.0 of 16.0 GB were in use"


def test_a_kill_by_the_kernel_is_named() -> None:
    shown = _after([3, 15], kills=[7, 8]).shown()
    assert shown == (
        "15.0 of 16.0 GB were in use; the kernel killed a process because memory ran out"
    )


def test_a_look_too_soon_after_another_costs_nothing() -> None:
    pressure = Pressure(lambda: Memory(next(readings), 16 * GB), lambda: 0)
    readings = iter([GB])
    for moment in range(4):
        pressure.look(moment * 0.1)
    assert pressure.shown() == "1.0 of 16.0 GB were in use"
