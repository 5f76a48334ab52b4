"""Encodings of float32 values: how near they come, that nothing is lost, and that twins agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from closeranks.wire import kernels
from closeranks.wire.cast import Bf16, Fp16
from closeranks.wire.codec import Codec
from closeranks.wire.int8 import BLOCK, CInt8, Int8

needs_c = pytest.mark.skipif(kernels.library() is None, reason="the C kernels were not built here")
CODECS = [
    pytest.param(Bf16, id="bf16"),
    pytest.param(Fp16, id="fp16"),
    pytest.param(Int8, id="int8"),
    pytest.param(CInt8, id="int8-c", marks=needs_c),
]
# The largest error of an element, as a fraction of the largest of its block.
ERROR = {"bf16": 2.0**-8, "fp16": 2.0**-11, "int8": 0.5 / 127 * 1.001}
SIZES = (1, 2, 3, 5, 255, 256, 257, 511, 1023, 1024, 1025, 4099)


def _values(size: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.exp(spread * torch.randn(size, generator=generator))
    return torch.randn(size, generator=generator) * magnitudes


def _any_bits(size: int, seed: int) -> Tensor:
    """Any floats at all: subnormals, infinities and NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(-128, 128, (4 * size,), dtype=torch.int8, generator=generator)
    return raw.view(torch.float32)


def _encode(codec: Codec, values: Tensor, residual: Tensor | None = None) -> Tensor:
    out = torch.full((codec.bytes_for(values.numel()),), 99, dtype=torch.uint8)
    codec.encode(values, residual, out)
    return out


def _sum(codec: Codec, encoded: list[Tensor], numel: int, scale: float = 1.0) -> Tensor:
    out = torch.empty(numel)
    codec.sum(encoded, out, scale)
    return out


def _same(a: Tensor, b: Tensor) -> bool:
    """The same bits, where a NaN is a NaN."""
    nans = a.isnan() & b.isnan()
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | nans).all())


@pytest.mark.parametrize("make", CODECS)
@pytest.mark.parametrize("size", SIZES)
def test_decoded_values_are_near(make: type[Codec], size: int) -> None:
    codec = make()
    for seed in range(3):
        values = _values(size, seed)
        found = _sum(codec, [_encode(codec, values)], size)
        for start in range(0, size, codec.block):
            part = slice(start, start + codec.block)
            limit = ERROR[codec.name] * values[part].abs().max()
            assert (found[part] - values[part]).abs().max() <= limit


@pytest.mark.parametrize("make", CODECS)
@pytest.mark.parametrize("exponent", (-140, -126, -110, -20, 0, 40, 100, 127))
def test_no_magnitude_overflows_or_vanishes(make: type[Codec], exponent: int) -> None:
    codec = make()
    values = torch.tensor([1.0, -0.5, 0.25]) * 2.0**exponent
    found = _sum(codec, [_encode(codec, values)], 3)
    assert found.isfinite().all()
    # int8's scale is a normal number at least, so its steps do not follow below 127 * 2^-126, and
    # some processors take subnormal numbers for zero when they round to bfloat16.
    step = {"int8": 2.0**-127, "bf16": 2.0**-126, "fp16": 0.0}[codec.name]
    assert (found - values).abs().max() <= ERROR[codec.name] * values.abs().max() + step


@pytest.mark.parametrize("make", CODECS)
def test_what_is_not_finite_arrives_and_spares_its_neighbours(make: type[Codec]) -> None:
    codec = make()
    values = _values(700)
    clean = values.clone()
    values[3], values[300], values[301] = torch.inf, -torch.inf, torch.nan
    residual = torch.full((700,), 0.01)
    found = _sum(codec, [_encode(codec, values, residual)], 700)
    assert found[3] == torch.inf and found[300] == -torch.inf and found[301].isnan()
    assert residual.isfinite().all() and residual[[3, 300, 301]].eq(0).all()
    others = torch.ones(700, dtype=torch.bool)
    others[[3, 300, 301]] = False
    assert found[others].isfinite().all()
    near = 0.01 + 2 * ERROR[codec.name] * clean.abs().max()
    assert (found - clean)[others].abs().max() <= near


@pytest.mark.parametrize("make", CODECS)
@given(st.integers(1, 600), st.integers(0, 99), st.sampled_from((0.0, 1.0, 8.0)))
@settings(max_examples=25, deadline=None)
def test_what_is_sent_and_what_is_kept_are_the_whole(
    make: type[Codec], size: int, seed: int, spread: float
) -> None:
    codec = make()
    values, residual = _values(size, seed, spread), 0.1 * _values(size, seed + 1, spread)
    whole = values + residual
    found = _sum(codec, [_encode(codec, values, residual)], size)
    # The subtraction that makes the residual rounds once.
    assert torch.allclose(found + residual, whole, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("make", CODECS)
def test_a_constant_arrives_on_average(make: type[Codec]) -> None:
    """A gradient far below the resolution of its block is late, but not lost."""
    codec = make()
    values = torch.full((256,), 1e-4)
    values[0] = 1.0
    residual, total = torch.zeros(256), torch.zeros(256)
    for _ in range(1000):
        total += _sum(codec, [_encode(codec, values, residual)], 256)
    assert torch.allclose(total[1:], torch.tensor(0.1), rtol=0.1)


@pytest.mark.parametrize("make", CODECS)
@pytest.mark.parametrize("count", (1, 2, 3, 4, 5, 8))
def test_sums_are_in_the_order_of_the_tree(make: type[Codec], count: int) -> None:
    codec = make()
    encoded = [_encode(codec, _values(1000, seed)) for seed in range(count)]
    parts = [_sum(codec, [each], 1000) for each in encoded]

    def tree(lo: int, hi: int) -> Tensor:
        if hi - lo == 1:
            return parts[lo]
        half = 1 << (hi - lo - 1).bit_length() - 1
        return tree(lo, lo + half) + tree(lo + half, hi)

    for scale in (1.0, 1 / 3):
        assert _same(_sum(codec, encoded, 1000, scale), tree(0, count) * scale)


@pytest.mark.parametrize("make", CODECS)
def test_fewer_bytes(make: type[Codec]) -> None:
    codec = make()
    wanted = {"bf16": 0.5, "fp16": 0.502, "int8": 0.254}[codec.name]
    assert codec.bytes_for(1 << 20) <= wanted * 4 * (1 << 20)
    assert codec.bytes_for(0) == 0
    assert codec.bytes_for(codec.block * 7) == 7 * codec.bytes_for(codec.block)


@needs_c
@given(st.integers(1, 1200), st.integers(0, 10_000), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_int8_in_c_and_in_python_give_the_same_bits(
    size: int, seed: int, wild: bool, keeps: bool
) -> None:
    values = _any_bits(size, seed) if wild else _values(size, seed, 4.0)
    start = 0.01 * _values(size, seed + 1) if keeps else None
    found = []
    for codec in (Int8(), CInt8()):
        residual = None if start is None else start.clone()
        found.append((_encode(codec, values, residual), residual))
    (twin, kept), (in_c, kept_in_c) = found
    words = -(-size // 4) * 4
    assert torch.equal(twin[:size], in_c[:size])
    assert torch.equal(twin[words:], in_c[words:])
    assert kept is None or (kept_in_c is not None and _same(kept, kept_in_c))


@needs_c
@given(st.integers(1, 700), st.integers(1, 9), st.integers(0, 10_000), st.booleans())
@settings(max_examples=150, deadline=None)
def test_int8_sums_in_c_and_in_python_give_the_same_bits(
    size: int, count: int, seed: int, wild: bool
) -> None:
    encoded = []
    for n in range(count):
        values = _any_bits(size, seed + n) if wild else _values(size, seed + n, 2.0)
        encoded.append(_encode(CInt8(), values))
    for scale in (1.0, 1 / count, 0.1):
        assert _same(_sum(Int8(), encoded, size, scale), _sum(CInt8(), encoded, size, scale))


@needs_c
def test_int8_agrees_at_every_tie() -> None:
    """Halves of the step round to even in both."""
    values = torch.arange(-254, 255, dtype=torch.float32)[: 2 * BLOCK - 3] / 2
    values[0] = -127.0
    assert torch.equal(_encode(Int8(), values)[:508], _encode(CInt8(), values)[:508])
