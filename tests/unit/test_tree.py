"""The tree of sums: every number once, in order, and the same nodes in trees of every size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from closeranks.exchange.tree import fold, split

COUNTS = st.integers(1, 300)


def _written(count: int) -> str:
    """The sum of the first numbers, with its brackets."""
    return fold([str(n) for n in range(count)], lambda a, b: f"({a}+{b})")


def _depth(count: int) -> int:
    return fold([0] * count, lambda a, b: max(a, b) + 1)


def test_small_trees_are_those_of_the_docstring() -> None:
    assert _written(1) == "0"
    assert _written(2) == "(0+1)"
    assert _written(3) == "((0+1)+2)"
    assert _written(5) == "(((0+1)+(2+3))+4)"
    assert _written(6) == "(((0+1)+(2+3))+(4+5))"
    assert _written(7) == "(((0+1)+(2+3))+((4+5)+6))"


@given(COUNTS)
def test_every_number_is_there_once_and_in_order(count: int) -> None:
    assert fold([(n,) for n in range(count)], lambda a, b: a + b) == tuple(range(count))


@given(COUNTS)
def test_no_tree_is_deeper_than_it_must_be(count: int) -> None:
    assert _depth(count) == (count - 1).bit_length()


@given(lo=st.integers(0, 1000), length=st.integers(2, 300))
def test_a_node_splits_at_the_largest_power_of_two(lo: int, length: int) -> None:
    left = split(lo, lo + length) - lo
    assert left & (left - 1) == 0, "not a power of two"
    assert left < length <= 2 * left


@given(small=COUNTS, large=COUNTS)
def test_whole_nodes_are_the_same_in_every_tree(small: int, large: int) -> None:
    """The left part of a large tree is the whole tree over as many numbers."""
    left = 1 << (max(small, 2) - 1).bit_length()
    if left < large:
        assert _written(left) in _written(large)


@given(COUNTS)
def test_siblings_can_be_folded_apart(count: int) -> None:
    if count > 1:
        middle = split(0, count)
        numbers = [str(n) for n in range(count)]
        left = fold(numbers[:middle], lambda a, b: f"({a}+{b})")
        right = fold(numbers[middle:], lambda a, b: f"({a}+{b})")
        assert f"({left}+{right})" == _written(count)
