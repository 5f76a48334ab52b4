"""A quarter of the bytes: blocks of 256 elements as 8-bit integers with a common float32 scale.

    scale   the largest magnitude of the block / 127, at least the smallest normal float32
    code    round(value / scale), ties to even, -127..127;  it stands for code * scale

A block in which something is not finite has the negative of its scale, which marks it. There the
scale comes from the largest finite magnitude / 126, and three codes mean something else:
127 is +inf, -127 is -inf, -128 is NaN. So the finite neighbours of an infinity arrive as well.

Division by 127 and by the scale are multiplications with an inverse rounded to float32, in C and
here, so that both give the same bits. An encoding is all codes, filled up to whole words, and then
all scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from closeranks.wire import kernels
from closeranks.wire.codec import Codec

BLOCK = 256
_SCALE_MIN = torch.finfo(torch.float32).tiny
_INFINITE = 0x7F800000  # the bits of the smallest magnitude that is not finite
_PER_STEP = float(torch.tensor(1.0) / 127)
_PER_STEP_MARKED = float(torch.tensor(1.0) / 126)


class Int8(Codec):
    """In torch operations, on any device."""

    name = "int8"
    block = BLOCK

    def bytes_for(self, numel: int) -> int:
        return _padded(numel) + 4 * -(-numel // BLOCK)

    def write(self, values: Tensor, out: Tensor) -> None:
        rows = pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
        top = (rows.view(torch.int32) & 0x7FFFFFFF).amax(1)
        scale = (top.view(torch.float32) * _PER_STEP).clamp_(min=_SCALE_MIN)
        marked = top >= _INFINITE
        codes, scales = _parts(out, values.numel())
        if bool(marked.any()):
            finite = torch.where(rows.isfinite(), rows, 0.0)
            other = (finite.abs().amax(1) * _PER_STEP_MARKED).clamp_(min=_SCALE_MIN)
            scale = torch.where(marked, other, scale)
            rounded = _rounded(finite, scale)
            rounded = torch.where(rows.isposinf(), 127, rounded)
            rounded = torch.where(rows.isneginf(), -127, rounded)
            rounded = torch.where(rows.isnan(), -128, rounded)
            scale = torch.where(marked, -scale, scale)
        else:
            rounded = _rounded(rows, scale)
        codes.copy_(rounded.view(-1)[: values.numel()])
        scales.copy_(scale)

    def read(self, encoded: Tensor, numel: int) -> Tensor:
        codes, scales = _parts(encoded, numel)
        rows = pad(codes.float(), (0, -numel % BLOCK)).view(-1, BLOCK)
        values = rows * scales.abs().unsqueeze(1)
        marked = scales < 0
        if bool(marked.any()):
            there = marked.unsqueeze(1)
            values = torch.where(there & (rows == 127), torch.inf, values)
            values = torch.where(there & (rows == -127), -torch.inf, values)
            values = torch.where(there & (rows == -128), torch.nan, values)
        return values.view(-1)[:numel]


class CInt8(Int8):
    """In C, for tensors of the CPU."""

    def __init__(self) -> None:
        loaded = kernels.library()
        assert loaded is not None, "the C kernels are used where they can be loaded"
        self._library = loaded

    def encode(self, values: Tensor, residual: Tensor | None, out: Tensor) -> None:
        codes, scales = _parts(out, values.numel())
        self._library.cw_int8_encode(
            values.data_ptr(),
            None if residual is None else residual.data_ptr(),
            codes.data_ptr(),
            scales.data_ptr(),
            values.numel(),
        )

    def sum(self, encoded: Sequence[Tensor], out: Tensor, scale: float) -> None:
        parts = [_parts(each, out.numel()) for each in encoded]
        self._library.cw_int8_sum(
            kernels.addresses([codes for codes, _ in parts]),
            kernels.addresses([scales for _, scales in parts]),
            len(parts),
            scale,
            out.data_ptr(),
            out.numel(),
        )


def make(device: torch.device) -> Int8:
    """The codec for tensors of a device."""
    return CInt8() if device.type == "cpu" and kernels.wanted() is not None else Int8()


def _rounded(rows: Tensor, scale: Tensor) -> Tensor:
    return (rows * (torch.ones_like(scale) / scale).unsqueeze(1)).round_()


def _parts(encoded: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Codes and scales."""
    words = _padded(numel)
    return encoded[:numel].view(torch.int8), encoded[words:].view(torch.float32)


def _padded(numel: int) -> int:
    return -(-numel // 4) * 4
