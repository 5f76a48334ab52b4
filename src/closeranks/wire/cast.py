"""Half the bytes: each float32 element as a 16-bit float.

bf16 has float32's range and 8 bits of precision. fp16 has 11 bits and a small range, so every block
of elements is first multiplied by the power of two that brings its largest to just below 2^15:
nothing overflows, and nothing within a factor of 2^29 of the largest loses precision. The inverses
of these factors, float32, stand behind the elements. NaN and infinities are the 16-bit ones.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from closeranks.wire.codec import Codec


class Bf16(Codec):
    """Each element rounded to the nearest bfloat16."""

    name = "bf16"
    block = 64  # so that every part of a tensor begins at a whole cache line

    def bytes_for(self, numel: int) -> int:
        return 2 * numel

    def write(self, values: Tensor, out: Tensor) -> None:
        out.view(torch.bfloat16).copy_(values)

    def read(self, encoded: Tensor, numel: int) -> Tensor:
        return encoded.view(torch.bfloat16).float()


class Fp16(Codec):
    """Each element rounded to the nearest float16, after scaling its block."""

    name = "fp16"
    block = 1024

    def bytes_for(self, numel: int) -> int:
        return _padded(2 * numel) + 4 * -(-numel // self.block)

    def write(self, values: Tensor, out: Tensor) -> None:
        numel = values.numel()
        halves, units = self._parts(out, numel)
        rows = pad(values, (0, -numel % self.block)).view(-1, self.block)
        largest = torch.nan_to_num(rows, 0.0, 0.0, 0.0).abs().amax(1)
        exponents = torch.frexp(largest)[1].sub_(15).clamp_(min=-126)
        one = torch.ones_like(largest)
        units.copy_(torch.ldexp(one, exponents))
        scaled = rows * torch.ldexp(one, -exponents).unsqueeze(1)
        halves.copy_(scaled.view(-1)[:numel])

    def read(self, encoded: Tensor, numel: int) -> Tensor:
        halves, units = self._parts(encoded, numel)
        rows = pad(halves.float(), (0, -numel % self.block)).view(-1, self.block)
        return (rows * units.unsqueeze(1)).view(-1)[:numel]

    def _parts(self, encoded: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        return encoded[: 2 * numel].view(torch.float16), encoded[_padded(2 * numel) :].view(
            torch.float32
        )


def _padded(size_bytes: int) -> int:
    """Whole float32 words."""
    return -(-size_bytes // 4) * 4
