"""Modules' buffers, which a forward may change: every lane begins with the same ones.

The buffers after what came before are kept aside. Before each lane they are put back; after a phase
they become what lane 0 made of them. Whether a buffer has changed is seen from its bytes: torch
counts changes of tensors, but not those that its batch norm makes. Only for buffers of more than
16 MB, which are tables and masks, torch's count is believed.

Knows modules and bytes; must not know workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from closeranks.checkpoint.format import as_bytes

_ALIGN_BYTES = 64
_COMPARED_BYTES_MAX = 1 << 24


class Buffers:
    """The buffers of some modules."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._places: list[tuple[nn.Module, str]] = []
        seen: set[int] = set()
        for top in modules:
            for module in top.modules():
                if id(module) not in seen:
                    seen.add(id(module))
                    self._places += [(module, name) for name in module._buffers]
        self._kept: list[tuple[Tensor, int, Tensor] | None] = [None] * len(self._places)
        self.keep()

    def keep(self) -> None:
        """Whatever the buffers are now is what they are put back to."""
        for k, (module, name) in enumerate(self._places):
            buffer, kept = module._buffers.get(name), self._kept[k]
            if buffer is None:
                self._kept[k] = None
            elif kept is None or _differs(buffer, kept):
                copy = kept[2] if kept is not None and _fits(buffer, kept[2]) else None
                copy = buffer.detach().clone() if copy is None else copy.copy_(buffer.detach())
                self._kept[k] = (buffer, buffer._version, copy)

    def have_changed(self) -> bool:
        return any(
            (buffer is not None) != (kept is not None)
            or (buffer is not None and kept is not None and _differs(buffer, kept))
            for buffer, kept in self._pairs()
        )

    def put_back(self) -> None:
        """Undo whatever a lane did to the buffers."""
        for k, (module, name) in enumerate(self._places):
            buffer, kept = module._buffers.get(name), self._kept[k]
            if kept is None:
                module._buffers[name] = None
            elif buffer is None or _differs(buffer, kept):
                original, _, copy = kept
                with torch.no_grad():
                    original.copy_(copy)
                module._buffers[name] = original
                self._kept[k] = (original, original._version, copy)

    @property
    def size_bytes(self) -> int:
        """How long pack() makes them."""
        return sum(_padded(kept[2]) for kept in self._kept if kept is not None)

    def pack(self, target: Tensor) -> None:
        """Write the buffers as they are now into size_bytes bytes."""
        at = 0
        for buffer, kept in self._pairs():
            if kept is None:
                continue
            if buffer is None or not _fits(buffer, kept[2]):
                raise ValueError(
                    f"a forward has made a buffer of {tuple(kept[2].shape)} elements of "
                    f"{kept[2].dtype} into another kind of tensor, so it cannot be handed to the "
                    "other workers. Keep shapes and types of buffers, or use a plain attribute."
                )
            raw = as_bytes(buffer)
            target[at : at + raw.numel()].copy_(raw)
            at += _padded(buffer)

    def packed(self) -> Tensor:
        """The buffers as they are now, in memory of its own."""
        found = torch.zeros(self.size_bytes, dtype=torch.uint8)
        self.pack(found)
        return found

    def unpack(self, source: Tensor) -> list[Tensor]:
        """The values that pack() wrote, as tensors of their own, to be given to adopt()."""
        values, at = [], 0
        for kept in self._kept:
            if kept is not None:
                raw = source[at : at + kept[2].numel() * kept[2].element_size()].clone()
                values.append(raw.view(kept[2].dtype).view(kept[2].shape))
                at += _padded(kept[2])
        return values

    def adopt(self, values: Sequence[Tensor]) -> None:
        """Make the buffers what another worker says they are."""
        self.put_back()
        rest = iter(values)
        with torch.no_grad():
            for buffer, kept in self._pairs():
                if buffer is not None and kept is not None:
                    buffer.copy_(next(rest))
        self.keep()

    def _pairs(self) -> list[tuple[Tensor | None, tuple[Tensor, int, Tensor] | None]]:
        now = [module._buffers.get(name) for module, name in self._places]
        return list(zip(now, self._kept, strict=True))


def _differs(buffer: Tensor, kept: tuple[Tensor, int, Tensor]) -> bool:
    if buffer is not kept[0] or buffer._version != kept[1]:
        return True
    if buffer.numel() * buffer.element_size() > _COMPARED_BYTES_MAX:
        return False
    return not torch.equal(as_bytes(buffer), as_bytes(kept[2]))


def _fits(buffer: Tensor, copy: Tensor) -> bool:
    return (buffer.shape, buffer.dtype, buffer.device) == (copy.shape, copy.dtype, copy.device)


def _padded(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGN_BYTES) * _ALIGN_BYTES
