"""closeranks: DistributedDataParallel for PyTorch.

The names below are the whole public surface. They are loaded on first use, so that starting the
launcher imports no torch. Importing this package also gives torch.distributed the backend
"closeranks", now or when torch comes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from closeranks.backend import registration

if TYPE_CHECKING:
    from closeranks.ddp.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm
    from closeranks.ddp.wrapper import DistributedDataParallel
    from closeranks.errors import (
        CheckpointDamaged,
        CheckpointInUse,
        CheckpointMismatch,
        CloseranksError,
        ExchangeFailed,
        HookFailed,
        LaneDeadly,
        LaneUnsteady,
        LoopDiverged,
        ModelMismatch,
        OutOfData,
        ParameterSwapped,
        PeerLost,
        RankAbsent,
        WorkersDiffer,
    )
    from closeranks.lanes.ranks import Ranks
    from closeranks.observe.progress import progress
    from closeranks.world import World, init

_HOMES = {
    "CheckpointDamaged": "closeranks.errors",
    "CheckpointInUse": "closeranks.errors",
    "CheckpointMismatch": "closeranks.errors",
    "CloseranksError": "closeranks.errors",
    "DistributedDataParallel": "closeranks.ddp.wrapper",
    "ExchangeFailed": "closeranks.errors",
    "HookFailed": "closeranks.errors",
    "LaneDeadly": "closeranks.errors",
    "LaneUnsteady": "closeranks.errors",
    "LoopDiverged": "closeranks.errors",
    "ModelMismatch": "closeranks.errors",
    "OutOfData": "closeranks.errors",
    "ParameterSwapped": "closeranks.errors",
    "PeerLost": "closeranks.errors",
    "RankAbsent": "closeranks.errors",
    "Ranks": "closeranks.lanes.ranks",
    "SyncBatchNorm": "closeranks.ddp.sync_batchnorm",
    "WorkersDiffer": "closeranks.errors",
    "World": "closeranks.world",
    "convert_sync_batchnorm": "closeranks.ddp.sync_batchnorm",
    "init": "closeranks.world",
    "progress": "closeranks.observe.progress",
}

__all__ = [
    "CheckpointDamaged",
    "CheckpointInUse",
    "CheckpointMismatch",
    "CloseranksError",
    "DistributedDataParallel",
    "ExchangeFailed",
    "HookFailed",
    "LaneDeadly",
    "LaneUnsteady",
    "LoopDiverged",
    "ModelMismatch",
    "OutOfData",
    "ParameterSwapped",
    "PeerLost",
    "RankAbsent",
    "Ranks",
    "SyncBatchNorm",
    "WorkersDiffer",
    "World",
    "convert_sync_batchnorm",
    "init",
    "progress",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'closeranks' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


registration.arrange()
