"""`python -m closeranks.measure.build`: one line of JSON about this torch and our kernels."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from closeranks.segment import kernels, memory


def describe() -> dict[str, Any]:
    is_there = dist.is_available()
    return {
        "version": torch.__version__,
        "cuda_built": torch.version.cuda,
        "cuda_devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "backends": {
            "gloo": is_there and dist.is_gloo_available(),
            "nccl": is_there and dist.is_nccl_available(),
            "mpi": is_there and dist.is_mpi_available(),
        },
        "kernels": kernels.kinds_here(),
        "unable_to_share": memory.is_possible(),
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(describe()) + "\n")
