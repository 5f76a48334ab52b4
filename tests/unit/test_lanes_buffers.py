"""Modules' buffers are put back before every lane, whoever changes them and however."""

from __future__ import annotations

import torch
from torch import nn

from closeranks.lanes.buffers import Buffers


def test_what_batch_norm_changes_is_put_back() -> None:
    """torch does not count its changes of the running statistics."""
    norm = nn.BatchNorm1d(4)
    norm.num_batches_tracked = None  # which it does count
    buffers = Buffers([norm])
    before = norm.running_mean.clone()
    norm(torch.randn(8, 4))
    assert buffers.have_changed()
    buffers.put_back()
    assert torch.equal(norm.running_mean, before)
    assert not buffers.have_changed()


def test_packed_buffers_are_adopted_elsewhere() -> None:
    ours, theirs = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    a, b = Buffers([ours]), Buffers([theirs])
    ours(torch.randn(8, 4))
    theirs(torch.randn(8, 4))
    packed = torch.zeros(a.size_bytes, dtype=torch.uint8)
    a.pack(packed)
    b.adopt(b.unpack(packed))
    for name, buffer in ours.named_buffers():
        assert torch.equal(buffer, dict(theirs.named_buffers())[name])
    assert not b.have_changed()


def test_a_buffer_that_was_replaced_comes_back() -> None:
    module = nn.Module()
    module.register_buffer("table", torch.arange(3.0))
    table = module.table
    buffers = Buffers([module])
    module.table = torch.zeros(3)
    assert buffers.have_changed()
    buffers.put_back()
    assert module.table is table
