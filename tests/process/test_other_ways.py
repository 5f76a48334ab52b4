"""What other files test over the fastest exchange that there is, over the others.

The ways give results of their own bits and have code paths of their own: scaling before or during
the flight, buckets in private or in shared memory, waits inside gloo or in ours.
"""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.process import (
    test_autograd_grad,
    test_buckets,
    test_buffers,
    test_freezing,
    test_join,
    test_no_sync,
    test_several_backwards,
    test_unused,
)
from tests.process.batch import Batch
from tests.process.exchange_ways import WAYS

_FILES: tuple[ModuleType, ...] = (
    test_autograd_grad,
    test_buckets,
    test_buffers,
    test_freezing,
    test_join,
    test_no_sync,
    test_several_backwards,
    test_unused,
)


def _again(file: ModuleType, way: str) -> Batch:
    batch = Batch(env=WAYS[way])
    for name in file.batch.names():
        batch.add(getattr(file, name))
    return batch


_BATCHES = {
    (file.__name__.rsplit(".", 1)[1], way): _again(file, way)
    for way, files in (("group", _FILES), ("shm-python", (test_buckets, test_no_sync, test_unused)))
    for file in files
}


@pytest.mark.parametrize(
    ("file", "way", "name"),
    [(file, way, name) for (file, way), batch in _BATCHES.items() for name in batch.names()],
)
def test_it_holds_over_other_ways_too(file: str, way: str, name: str) -> None:
    _BATCHES[file, way].check(name, 2)
