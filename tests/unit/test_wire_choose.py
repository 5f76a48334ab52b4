"""Names of formats, what is kept between exchanges, and which format a link deserves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from closeranks.wire.choose import WORTH, Candidate, Link, choose, has_drifted
from closeranks.wire.feedback import Residuals
from closeranks.wire.formats import RANK_MAX, parse

CPU = torch.device("cpu")


@pytest.mark.parametrize("text", ("bf16", "fp16", "int8", "powersgd:1", "powersgd:64", "auto"))
def test_a_format_is_called_what_it_was_asked_for(text: str) -> None:
    assert str(parse(text)) == text
    assert not parse(text).is_exact


def test_exact_is_a_format() -> None:
    assert parse("exact").is_exact


@pytest.mark.parametrize(
    "text",
    (
        *("", "int9", "INT8", "powersgd", "powersgd:", "powersgd:0", "powersgd:65"),
        *("powersgd:-1", "powersgd:2.5", "int8:4", "bf16 ", "powersgd:99999999"),
    ),
)
def test_what_is_no_format_is_refused_with_all_that_are(text: str) -> None:
    with pytest.raises(ValueError, match="no wire format") as caught:
        parse(text)
    for name in ("bf16", "fp16", "int8", "powersgd", "auto", "exact", str(RANK_MAX)):
        assert name in str(caught.value)


EXACT = Candidate("exact", 50e6, 1, 0.0)
HALF = Candidate("bf16", 25e6, 1, 0.005)
QUARTER = Candidate("int8", 12.7e6, 1, 0.012)
FACTORS = Candidate("powersgd:4", 1e6, 2, 0.1)
ALL = (EXACT, HALF, QUARTER, FACTORS)


@pytest.mark.parametrize(
    ("bytes_per_s", "wanted"),
    ((12.5e6, "powersgd:4"), (125e6, "int8"), (2e9, "bf16"), (20e9, "exact")),
)
def test_a_link_gets_what_it_deserves(bytes_per_s: float, wanted: str) -> None:
    choice = choose(ALL, Link(1e-4, bytes_per_s))
    assert choice.name == wanted
    assert "Mbit/s" in choice.reason and wanted in choice.reason


seconds = st.floats(1e-5, 10)


@given(st.floats(1e5, 1e11), seconds, st.lists(seconds, min_size=3, max_size=3))
def test_no_lossy_format_where_exact_is_as_fast(
    bytes_per_s: float, latency_s: float, works: list[float]
) -> None:
    link = Link(latency_s, bytes_per_s)
    candidates = [EXACT] + [
        Candidate(c.name, c.bytes_sent, c.messages, work)
        for c, work in zip(ALL[1:], works, strict=True)
    ]
    choice = choose(candidates, link)
    chosen = next(c for c in candidates if c.name == choice.name)
    assert chosen is EXACT or chosen.seconds(link) <= WORTH * EXACT.seconds(link)
    fastest = min(c.seconds(link) for c in candidates)
    assert chosen.seconds(link) <= fastest / WORTH**1.001


def test_a_message_of_few_bytes_stays_exact() -> None:
    small = [Candidate("exact", 4000, 1, 0.0), Candidate("powersgd:4", 100, 2, 1e-4)]
    assert choose(small, Link(1e-3, 125e6)).name == "exact"


def test_drift_is_by_a_factor_in_either_direction() -> None:
    before = Link(1e-4, 100e6)
    assert not has_drifted(before, Link(1e-4, 120e6))
    assert not has_drifted(before, Link(1e-4, 80e6))
    assert has_drifted(before, Link(1e-4, 10e6))
    assert has_drifted(before, Link(1e-4, 1e9))


# What was not sent.

ONE = (("a", 0, 3), ("b", 3, 4))


def test_residuals_begin_with_zero_and_stay_where_they_are() -> None:
    residuals = Residuals()
    flat = residuals.flat(ONE, CPU)
    assert flat.eq(0).all() and flat.numel() == 7
    flat += 1
    assert residuals.flat(ONE, CPU) is flat
    assert residuals.knows(ONE) and not residuals.knows((("c", 0, 3),))


def test_residuals_follow_their_pieces() -> None:
    residuals = Residuals()
    residuals.flat(ONE, CPU).copy_(torch.arange(7.0))
    assert residuals.flat((("b", 0, 4), ("c", 4, 2)), CPU).tolist() == [3, 4, 5, 6, 0, 0]
    assert residuals.flat((("c", 0, 2), ("a", 2, 3)), CPU).tolist() == [0, 0, 0, 1, 2]


def test_a_piece_of_another_length_begins_anew() -> None:
    residuals = Residuals()
    residuals.flat(ONE, CPU).fill_(1)
    assert residuals.flat((("a", 0, 5),), CPU).tolist() == [0] * 5


def test_what_has_been_sent_is_forgotten() -> None:
    residuals = Residuals()
    residuals.flat(ONE, CPU).fill_(1)
    residuals.forget(ONE)
    assert not residuals.knows(ONE)
    assert residuals.flat(ONE, CPU).eq(0).all()


def test_residuals_are_saved_and_loaded() -> None:
    residuals = Residuals()
    flat = residuals.flat(ONE, CPU)
    flat.copy_(torch.arange(7.0))
    state = residuals.state()
    flat.zero_()
    assert state["b"].tolist() == [3, 4, 5, 6], "a state is a copy"
    other = Residuals()
    other.load(state)
    assert other.flat((("b", 0, 4),), CPU).tolist() == [3, 4, 5, 6]
    assert other.flat((("a", 0, 3),), CPU).tolist() == [0, 1, 2]
    assert state["b"].tolist() == [3, 4, 5, 6], "and stays one"
