"""The sums in C and in Python: the same bits, and the right ones.

Both are asked through the classes that ranks use; one process plays all ranks, since a sum needs
only the buffers of all.
"""

from __future__ import annotations

import functools
import itertools
import mmap
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from closeranks.exchange.tree import fold
from closeranks.segment import kernels, page, twin
from closeranks.segment.kernels import CKernels, library, make
from closeranks.segment.page import ARRIVED, PAGE_SIZE_BYTES, Page
from closeranks.segment.twin import TwinKernels, share
from closeranks.segment.waiting import WaitPolicy

needs_c = pytest.mark.skipif(library() is None, reason="the C kernels were not built here")

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)
SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 1000, 2047, 2048, 2049, 4099)


@functools.cache
def _pages(count: int) -> list[Page]:
    return [Page(mmap.mmap(-1, PAGE_SIZE_BYTES)) for _ in range(count)]


@functools.cache
def _both(count: int, rank: int = 0) -> tuple[CKernels, TwinKernels]:
    pages = _pages(count)
    policy = WaitPolicy(0, 0)
    in_c = make("c", pages, rank, policy)
    assert isinstance(in_c, CKernels)
    return in_c, make("python", pages, rank, policy)


def _bits(tensor: Tensor) -> Tensor:
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(sizes[tensor.element_size()])


def _same(a: Tensor, b: Tensor) -> bool:
    """The same bits, where a NaN is a NaN: which of two is passed on is not promised."""
    nans = a.isnan() & b.isnan()
    return bool(((_bits(a) == _bits(b)) | nans).all())


def _patterns(count: int, size: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Any bits at all: subnormals, infinities and NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(
        -128, 128, (count, size * dtype.itemsize), dtype=torch.int8, generator=generator
    )
    return [row.clone().view(dtype) for row in raw]


def _folded(by: TwinKernels, sources: Sequence[Tensor], scale: float) -> Tensor:
    out = torch.empty_like(sources[0])
    by.fold(sources, [out], scale)
    return out


def _pushed(count: int, in_c: bool, buffers: Sequence[Tensor], scale: float) -> list[Tensor]:
    """Every rank does its share, in an order that no rank may rely on."""
    copies = [b.clone() for b in buffers]
    for rank in reversed(range(count)):
        _both(count, rank)[0 if in_c else 1].push(copies).share(scale)
    return copies


@needs_c
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", range(1, 10))
def test_c_and_python_give_the_same_bits(count: int, dtype: torch.dtype) -> None:
    in_c, in_python = _both(count)
    for size in SIZES:
        for scale in (1.0, 1.0 / count, 0.1):
            sources = _patterns(count, size, dtype, seed=size)
            wanted = _folded(in_python, sources, scale)
            assert _same(_folded(in_c, sources, scale), wanted), (size, scale)
            if count > 1:
                for tensor in _pushed(count, True, sources, scale):
                    assert _same(tensor, wanted), (size, scale)
                for tensor in _pushed(count, False, sources, scale):
                    assert _same(tensor, wanted), (size, scale)


@needs_c
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_buffer_may_begin_anywhere(dtype: torch.dtype) -> None:
    in_c, in_python = _both(3)
    for shift in range(9):
        sources = [t[shift:] for t in _patterns(3, 300 + shift, dtype, seed=shift)]
        assert _same(_folded(in_c, sources, 0.5), _folded(in_python, sources, 0.5)), shift


@needs_c
@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_survives_widening(dtype: torch.dtype) -> None:
    """All 65536 of them, plus zero: C widens and rounds them as torch does."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    zero = torch.zeros_like(every)
    in_c, _ = _both(2)
    assert _same(_folded(in_c, [every, zero], 1.0), every + zero)


@needs_c
@pytest.mark.parametrize("dtype", HALVES)
def test_every_rounding_to_half_is_torchs(dtype: torch.dtype) -> None:
    """A half times a scale hits ties, overflow, and results below the smallest normal."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    zero = torch.zeros_like(every)
    in_c, _ = _both(2)
    for scale in (1.5, 1.0 / 3, 3.0, 2.0**-9, 2.0**9, 1.0 + 2.0**-11, 1e-3, 1e4):
        wanted = ((every.float() + 0.0) * scale).to(dtype)
        assert _same(_folded(in_c, [every, zero], scale), wanted), scale


@needs_c
@pytest.mark.parametrize("dtype", HALVES)
def test_flushing_of_subnormals_changes_neither_twin_alone(dtype: torch.dtype) -> None:
    """A program may have asked torch to flush subnormals; the processor's mode is then both's."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormals")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torch tells this thread only
    try:
        every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
        zero = torch.zeros_like(every)
        in_c, in_python = _both(2)
        for scale in (1.0, 0.5):
            wanted = _folded(in_python, [every, zero], scale)
            assert _same(_folded(in_c, [every, zero], scale), wanted), scale
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", ("c", "python"))
@pytest.mark.parametrize("count", range(1, 10))
def test_the_order_is_the_tree(kind: str, count: int) -> None:
    """float32 values of very different size: every other order gives other bits."""
    if kind == "c" and library() is None:
        pytest.skip("the C kernels were not built here")
    generator = torch.Generator().manual_seed(count)
    sources = [torch.randn(500, generator=generator) * 10.0 ** (r % 5) for r in range(count)]
    by = make(kind, _pages(count), 0, WaitPolicy(0, 0))
    wanted = fold(sources, torch.add) * 0.3
    assert torch.equal(_folded(by, sources, 0.3), wanted)


@pytest.mark.parametrize("kind", ("c", "python"))
@pytest.mark.parametrize("dtype", HALVES)
def test_halves_are_rounded_once(kind: str, dtype: torch.dtype) -> None:
    """1 + eps/2 eight times over: rounding each sum would lose every small part."""
    if kind == "c" and library() is None:
        pytest.skip("the C kernels were not built here")
    eps = torch.finfo(dtype).eps
    sources = [torch.full((70,), 1.0 if r == 0 else eps / 2, dtype=dtype) for r in range(9)]
    by = make(kind, _pages(9), 0, WaitPolicy(0, 0))
    assert torch.equal(_folded(by, sources, 1.0), torch.full((70,), 1.0 + 4 * eps, dtype=dtype))


@needs_c
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64, torch.uint8, torch.complex64))
def test_what_c_has_no_kernel_for_is_summed_all_the_same(dtype: torch.dtype) -> None:
    in_c, in_python = _both(3)
    sources = [torch.arange(100).add(r).to(dtype) for r in range(3)]
    assert torch.equal(_folded(in_c, sources, 1.0), sources[0] + sources[1] + sources[2])
    assert torch.equal(_folded(in_python, sources, 1.0), _folded(in_c, sources, 1.0))


@given(numel=st.integers(0, 10_000), ranks=st.integers(1, 70))
def test_shares_are_all_of_it_and_apart(numel: int, ranks: int) -> None:
    shares = [share(numel, ranks, rank) for rank in range(ranks)]
    assert shares[0][0] == 0 and shares[-1][1] == numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(shares))
    assert all(start % 64 == 0 or start == numel for start, _ in shares)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(2, 9),
    size=st.integers(1, 5000),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 1 << 30),
)
@needs_c
def test_any_bits_of_any_size_are_summed_alike(
    count: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    sources = _patterns(count, size, dtype, seed)
    in_c, in_python = _both(count)
    wanted = _folded(in_python, sources, 1.0 / count)
    assert _same(_folded(in_c, sources, 1.0 / count), wanted)
    for tensor in _pushed(count, True, sources, 1.0 / count):
        assert _same(tensor, wanted)


@needs_c
def test_words_lie_where_both_look_for_them() -> None:
    """What C publishes, Python sees, at the offsets that page.py tells, and the other way round."""
    pages = [Page(mmap.mmap(-1, PAGE_SIZE_BYTES)) for _ in range(3)]
    in_c = [make("c", pages, rank, WaitPolicy(0, 0)) for rank in range(3)]
    in_python = [make("python", pages, rank, WaitPolicy(0, 0)) for rank in range(3)]
    for which in (page.ARRIVED, page.DONE):
        for rank in range(3):
            word = 1000 * which + rank + 1
            in_c[rank].publish(which, word)
            assert pages[rank].words[which // 4] == word
            in_python[rank].publish(which, word + 7)
        assert in_c[0].await_all(which, 1000 * which + 8, 0) < 0
        assert in_c[0].await_all(which, 1000 * which + 9, 0) == 0
        assert in_python[0].await_all(which, 1000 * which + 9, 0) == 0
        assert in_c[1].await_all(which, 1000 * which + 8, 1000) < 0
        touched = {i for i, word in enumerate(pages[1].words[:1024]) if word}
        assert touched <= {page.ARRIVED // 4, page.DONE // 4, page.ASLEEP // 4, page.CLOSED // 4}


@pytest.mark.parametrize("kind", ("c", "python"))
def test_words_wrap_around(kind: str) -> None:
    if kind == "c" and library() is None:
        pytest.skip("the C kernels were not built here")
    pages = [Page(mmap.mmap(-1, PAGE_SIZE_BYTES)) for _ in range(2)]
    ranks = [make(kind, pages, rank, WaitPolicy(0, 0)) for rank in range(2)]
    for rank in ranks:
        rank.publish(ARRIVED, (1 << 32) - 3)
    for tick in range((1 << 32) - 2, (1 << 32) + 3):
        word = page.wrapped(tick)
        ranks[1].publish(ARRIVED, word)
        assert ranks[0].await_all(ARRIVED, word, 0) == 0
        ranks[0].publish(ARRIVED, word)
        assert ranks[0].await_all(ARRIVED, word, 0) < 0


def test_a_wait_ends_after_its_slice() -> None:
    pages = [Page(mmap.mmap(-1, PAGE_SIZE_BYTES)) for _ in range(2)]
    for kind in kernels.kinds_here():
        assert make(kind, pages, 0, WaitPolicy(10, 100)).await_all(ARRIVED, 5, 2000) == 0


def test_chunks_of_the_twin_cover_a_long_buffer() -> None:
    """Longer than a chunk, so that the seams between chunks are seen."""
    size = 3 * twin.CHUNK_BYTES // 4 + 17
    sources = [torch.full((size,), float(r + 1)) for r in range(2)]
    for tensor in _pushed(2, False, sources, 1.0):
        assert torch.equal(tensor, torch.full((size,), 3.0))
