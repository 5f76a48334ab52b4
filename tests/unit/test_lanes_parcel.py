"""What is packed in one process is opened in another with the same values, strides and place."""

from __future__ import annotations

import collections
import gc
import os
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from closeranks.lanes.parcel import Parcel, pack


class Batch(NamedTuple):
    images: torch.Tensor
    names: list[str]


def sent(value: Any) -> Parcel:
    return Parcel(*pack(value))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5),
        torch.randn(5, 3).t(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(7)[3:],
        torch.randn(4, 1).expand(4, 3),
        torch.arange(6)[::2],
        torch.tensor(3.5),
        torch.tensor([True, False]),
        torch.randn(9).to(torch.bfloat16),
        torch.randn(2, dtype=torch.complex64),
        torch.empty(0, 3),
    ],
    ids=lambda t: f"{t.dtype}{list(t.shape)}",
)
def test_a_tensor_stays_what_it_is(tensor: torch.Tensor) -> None:
    parcel = sent({"x": tensor})
    opened = parcel.open()["x"]
    assert torch.equal(opened, tensor) and opened.dtype == tensor.dtype
    assert opened.stride() == tensor.stride()
    if tensor.numel() and not tensor.is_complex():
        assert opened.data_ptr() % 64 == tensor.data_ptr() % 64
    parcel.close()


def test_other_values_travel_as_well() -> None:
    value = (
        Batch(torch.arange(4), ["a", "b"]),
        {"n": np.arange(5.0), "part": np.arange(9)[::2], "text": "x" * 3000},
        collections.OrderedDict(k=torch.ones(2)),
        np.float32(2.5),
    )
    parcel = sent(value)
    batch, arrays, ordered, scalar = parcel.open()
    assert torch.equal(batch.images, torch.arange(4)) and batch.names == ["a", "b"]
    assert arrays["n"].tolist() == [0, 1, 2, 3, 4] and arrays["part"].tolist() == [0, 2, 4, 6, 8]
    assert arrays["text"] == "x" * 3000 and ordered["k"].tolist() == [1, 1] and scalar == 2.5
    parcel.close()


def test_many_pieces_fit() -> None:
    many = {f"piece {k}": torch.full((k,), k) for k in range(1, 300)}
    parcel = sent(many)
    opened = parcel.open()
    assert all(torch.equal(opened[name], tensor) for name, tensor in many.items())
    parcel.close()


def test_every_opening_is_as_nobody_has_touched_it() -> None:
    parcel = sent(torch.zeros(1000))
    first = parcel.open()
    first += 1.0
    assert parcel.open().sum() == 0.0
    parcel.close()
    assert first.sum() == 1000.0


def test_no_descriptor_stays_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    parcel = sent([torch.ones(3)])
    opened = parcel.open()
    parcel.close()
    with pytest.raises(TypeError, match="pickle"):
        pack(memoryview(b"cannot be pickled"))
    assert opened[0].sum() == 3.0
    del opened
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
