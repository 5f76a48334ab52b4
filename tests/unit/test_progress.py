"""Rates, times and the words of progress: pure."""

import pytest

from closeranks.observe.pace import Pace, amount, duration
from closeranks.observe.progress import samples_in
from closeranks.observe.standing import Standing, Standings


class Shaped:
    def __init__(self, *shape: int) -> None:
        self.shape = shape


def test_a_pace_is_that_of_the_newest_moments() -> None:
    pace = Pace(window_s=10.0)
    assert pace.rate == 0.0
    for second in range(30):
        pace.note(float(second), 2.0 * second if second < 15 else 30.0 + 5.0 * (second - 15))
    assert pace.rate == pytest.approx(5.0)


def test_two_notes_in_one_moment_are_no_rate() -> None:
    pace = Pace()
    pace.note(1.0, 0)
    pace.note(1.0, 5)
    assert pace.rate == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (7.4, "0:07"), (754, "12:34"), (3723, "1:02:03")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.523, "0.52"), (35.24, "35.2"), (1126.4, "1126"), (48_231, "48.2k"), (2_340_000, "2.34M")],
)
def test_amounts(value: float, text: str) -> None:
    assert amount(value) == text


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (Shaped(32, 3), 32),
        ([Shaped(8), Shaped(8)], 8),
        ({"ids": Shaped(4, 100)}, 4),
        ((("text", Shaped(5)), 1), 5),
        (Shaped(), 0),
        (7, 0),
        ("text", 0),
    ],
)
def test_samples_of_a_batch(batch: object, samples: int) -> None:
    assert samples_in(batch) == samples


def _told(step: int, at_s: float, **others: object) -> dict[str, object]:
    told = {"loop": 0, "step": step, "total": 100, "began_s": 0.0, "at_s": at_s}
    told |= {"samples_ever": 8 * step, "waited": 0.0, "values": {}, "is_done": False}
    return told | others


def test_rates_are_over_all_ranks_and_the_last_values_are_the_leaders() -> None:
    standings = Standings()
    for second in range(5):
        assert not standings.tell(1, _told(10 * second, float(second)))
        assert standings.tell(0, _told(10 * second, float(second), values={"loss": "0.5"}))
    line = standings.standing().line()
    expected = "step 40/100 (40%), 10.0 steps/s, 160 samples/s, eta 0:06, loss 0.5"
    assert line == expected


@pytest.mark.parametrize(
    ("waited", "slowest"),
    [([0.4, 0.0, 0.3], 1), ([0.4, 0.35, 0.3], None), ([0.0, 0.0, 0.0], None), ([0.4, 0, 0], None)],
)
def test_the_slowest_is_the_one_that_alone_does_not_wait(
    waited: list[float], slowest: int | None
) -> None:
    standings = Standings()
    for rank, share in enumerate(waited):
        standings.tell(rank, _told(1, 1.0, waited=share))
    assert standings.standing().slowest == slowest


def test_a_new_loop_starts_anew() -> None:
    standings = Standings()
    for second in range(5):
        standings.tell(0, _told(10 * second, float(second)))
    standings.tell(0, _told(0, 5.0, loop=1, began_s=5.0))
    assert standings.standing().steps_per_s == 0.0


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("total", [None, 0, 100])
def test_a_bar_is_one_line_that_fits(width: int, total: int | None) -> None:
    bar = Standing(40, total, 4.0, 10.0, 80.0, {"[red]loss": "[/]"}).bar(width)
    import re

    plain = re.sub(r"\x1b\[[\d;]*m", "", bar)
    assert "\n" not in bar and len(plain) <= width
    if width == 200:
        assert "[red]loss [/]" in plain


def test_each_loop_has_rates_of_its_own() -> None:
    """What a first loop did, and the pause after it, do not slow down or hasten the second."""
    standings = Standings()
    for rank in (1, 0):
        for loop, began_s, rate in ((0, 0.0, 1000), (1, 12.0, 8)):
            for second in range(4):
                told = {"loop": loop, "step": second, "total": 3, "began_s": began_s}
                told |= {"at_s": began_s + second, "samples_ever": 1000 * loop + rate * second}
                told |= {"waited": 0.0, "values": {}, "is_done": loop == 1 and second == 3}
                standings.tell(rank, told)
    assert standings.standing().samples_per_s == pytest.approx(8.0)


def test_a_loop_that_is_done_tells_its_whole_rate() -> None:
    standings = Standings()
    for second in range(41):  # fast for half of it, then slow
        samples = 10 * min(second, 20) + max(0, second - 20)
        told = {"loop": 0, "step": second, "total": 40, "began_s": 0.0, "at_s": float(second)}
        told |= {"samples_ever": samples, "waited": 0.0, "values": {}, "is_done": second == 40}
        standings.tell(0, told)
    assert standings.standing().samples_per_s == pytest.approx(220 / 40)
