"""Which tensors can pass through memory, and how they become flat and contiguous for it.

Writing goes past autograd: c10d's collectives change tensors without autograd's noticing, and
torch's own DDP relies on it. Knows single tensors; must not know groups.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_dispatches_itself = Tensor.__torch_dispatch__


def are_plain(tensors: Iterable[Tensor]) -> bool:
    """Whether all are numbers in this process's memory, and nothing else stands for them."""
    return all(
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and type(tensor).__torch_dispatch__ is _dispatches_itself
        for tensor in tensors
    )


def flattened(tensor: Tensor) -> Tensor:
    """Its elements in order: a view where that is possible, else a copy."""
    return _bare(tensor).contiguous().view(-1)


def put_back(tensor: Tensor, flat: Tensor) -> None:
    """What flattened() gave has changed: so does the tensor."""
    bare = _bare(tensor)
    if not bare.is_contiguous() or bare.data_ptr() != flat.data_ptr():
        bare.copy_(flat.view(bare.shape))


def _bare(tensor: Tensor) -> Tensor:
    """The same elements without graph, version counter and Python class."""
    if type(tensor) is Tensor:
        return tensor.data
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.data
