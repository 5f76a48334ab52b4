"""PowerSGD by itself: several ranks played by one process, sums between the phases by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from closeranks.wire import factors, kernels
from closeranks.wire.powersgd import Matrix, PowerSgd, Shape, shape_of


def _exchange(
    ranks: list[PowerSgd], shape: Shape, values: list[Tensor], residuals: list[Tensor]
) -> list[Tensor]:
    """One exchange of all ranks; returns each rank's result, the mean."""
    for residual, value in zip(residuals, values, strict=True):
        residual.add_(value)
    lefts = [by.left(shape, given) for by, given in zip(ranks, residuals, strict=True)]
    left = torch.stack(lefts).sum(0)
    everyones = [left.clone() for _ in ranks]
    rights = [
        by.right(shape, mine, given)
        for by, mine, given in zip(ranks, everyones, residuals, strict=True)
    ]
    right = torch.stack(rights).sum(0)
    results = []
    for n, by in enumerate(ranks):
        by.keep_rest(shape, everyones[n], rights[n], residuals[n])
        out = torch.full_like(values[n], torch.nan)
        by.product(shape, everyones[n], right, out, 1 / len(ranks))
        results.append(out)
    return results


def _play(
    rank: int, pieces: list[Matrix], numel: int, steps: list[list[Tensor]]
) -> tuple[list[list[Tensor]], list[Tensor], list[PowerSgd]]:
    world = len(steps[0])
    ranks = [PowerSgd(rank) for _ in range(world)]
    shape = shape_of(pieces, numel, rank)
    residuals = [torch.zeros(numel) for _ in range(world)]
    results = [_exchange(ranks, shape, values, residuals) for values in steps]
    return results, residuals, ranks


def _low_rank(rows: int, cols: int, rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(rows, rank, generator=generator)
    return (left @ torch.randn(rank, cols, generator=generator)).flatten()


def test_matrices_that_save_nothing_travel_as_they_are() -> None:
    pieces = [("small", 0, 4, 4), ("large", 16, 100, 100), ("bias", 10016, 100, 1)]
    shape = shape_of(pieces, 10120, 2)
    assert [name for name, *_ in shape.matrices] == ["large"]
    assert shape.rest == ((0, 16), (10016, 10120))
    assert shape.left_numel == 2 * 100 + 16 + 104
    assert shape.right_numel == 200
    everything = shape_of([("bias", 0, 7, 1)], 7, 2)
    assert everything.rest == ((0, 7),) and everything.right_numel == 0


def test_a_matrix_of_low_rank_arrives_whole() -> None:
    values = _low_rank(60, 50, 3, seed=1)
    results, residuals, _ = _play(3, [("m", 0, 60, 50)], 3000, [[values, values]])
    assert torch.allclose(results[0][0], values, rtol=1e-3, atol=1e-3)
    assert residuals[0].abs().max() < 1e-3


@pytest.mark.parametrize("world", (1, 2, 3))
def test_all_ranks_end_with_the_same_bits(world: int) -> None:
    steps = [[torch.randn(6000) for _ in range(world)] for _ in range(5)]
    pieces = [("a", 0, 60, 50), ("b", 3000, 30, 90), ("c", 5700, 300, 1)]
    results, _, ranks = _play(4, pieces, 6000, steps)
    for result in results:
        assert all(torch.equal(result[0], other) for other in result)
    assert all(torch.equal(ranks[0].qs[name], by.qs[name]) for by in ranks for name in by.qs)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_what_arrives_and_what_is_kept_are_the_whole(rank: int, world: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    steps = [[torch.randn(2500, generator=generator) for _ in range(world)] for _ in range(4)]
    results, residuals, _ = _play(rank, [("m", 0, 40, 60)], 2500, steps)
    sent = sum(result[0] for result in results) * world
    whole = sum(value for values in steps for value in values)
    assert isinstance(sent, Tensor)
    assert torch.allclose(sent + sum(residuals), whole, rtol=1e-4, atol=1e-4)


def test_the_largest_directions_are_found_in_a_few_exchanges() -> None:
    values = 10 * _low_rank(80, 70, 2, seed=3) + torch.randn(5600)
    best = torch.linalg.matrix_norm(values.view(80, 70), ord="nuc")
    singular = torch.linalg.svdvals(values.view(80, 70))
    by, shape = PowerSgd(2), shape_of([("m", 0, 80, 70)], 5600, 2)
    for _ in range(4):
        (result,) = _exchange([by], shape, [values], [torch.zeros(5600)])
    error = torch.linalg.vector_norm(result - values)
    assert best > 0 and error <= 1.001 * torch.linalg.vector_norm(singular[2:])


def test_a_zero_gradient_does_not_end_the_search() -> None:
    """Zero factors would stay zero for ever."""
    zero, values = torch.zeros(3000), _low_rank(60, 50, 2, seed=5)
    results, _, _ = _play(2, [("m", 0, 60, 50)], 3000, [[zero], [zero], [values], [values]])
    assert results[0][0].eq(0).all()
    assert torch.allclose(results[2][0], values, rtol=1e-3, atol=1e-3)


def test_a_gradient_of_rank_one_does_not_disturb() -> None:
    values = _low_rank(60, 50, 1, seed=6)
    results, residuals, _ = _play(4, [("m", 0, 60, 50)], 3000, [[values]] * 6)
    for result in results:
        assert torch.allclose(result[0], values, rtol=1e-3, atol=1e-3)
    assert residuals[0].abs().max() < 1e-3


@pytest.mark.parametrize("rows", (1, 2, 5, 64, 65, 1000))
@pytest.mark.parametrize("rank", (1, 2, 4, 7))
def test_bases_are_orthonormal(rows: int, rank: int) -> None:
    matrices = [torch.randn(rows, rank) * 10.0**n for n in (-18, 0, 18)]
    before = [m.clone() for m in matrices]
    factors.orthonormal(matrices)
    for matrix, old in zip(matrices, before, strict=True):
        gram = matrix.t() @ matrix
        wanted = torch.diag((matrix != 0).any(0).float())
        assert torch.allclose(gram, wanted, atol=1e-4)
        assert int(wanted.sum()) == min(rows, rank)
        # The basis spans what was there.
        again = matrix @ (matrix.t() @ (old / old.abs().max()))
        assert torch.allclose(again, old / old.abs().max(), atol=1e-4)


def test_a_basis_depends_on_its_own_matrix_only() -> None:
    """Ranks may hold a matrix beside others of other sizes."""
    one, other = torch.randn(33, 3), torch.randn(60, 3)
    alone = one.clone()
    factors.orthonormal([alone])
    factors.orthonormal([other, one])
    assert torch.equal(alone, one)


@pytest.mark.skipif(kernels.library() is None, reason="the C kernels were not built here")
@given(st.integers(1, 40), st.integers(1, 600), st.integers(1, 8), st.integers(0, 999))
@settings(max_examples=60, deadline=None)
def test_products_in_c_and_in_python_give_the_same_bits(
    rows: int, cols: int, rank: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(rows, rank, generator=generator)
    right = torch.randn(rank, cols, generator=generator)
    found = [torch.empty(rows, cols) for _ in range(2)]
    factors.product(left, right, found[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLOSERANKS_KERNELS", "python")
        factors.product(left, right, found[1])
    assert torch.equal(found[0], found[1])
    assert torch.allclose(found[0], left @ right, rtol=1e-4, atol=1e-4)
