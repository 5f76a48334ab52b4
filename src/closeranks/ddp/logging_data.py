"""What `_get_ddp_logging_data()` tells: torch's keys, filled from our reducer.

Construction data stand from the start. Runtime data are those of the newest sampled iteration:
the first ten, then every hundredth, or as set by `_set_ddp_runtime_logging_sample_rate`.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._C._distributed_c10d import Logger as TorchLogger
from torch._C._distributed_c10d import Reducer as TorchReducer

from closeranks.exchange.group import group_name

if TYPE_CHECKING:
    from closeranks.ddp.upkeep import Upkeep

_ENVIRONMENT = {
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
    "gloo_socket_ifname": "GLOO_SOCKET_IFNAME",
    "gloo_device_transport": "GLOO_DEVICE_TRANSPORT",
}
_ENVIRONMENT_NCCL = {
    "nccl_socket_ifname": "NCCL_SOCKET_IFNAME",
    "nccl_blocking_wait": "TORCH_NCCL_BLOCKING_WAIT",
    "nccl_async_error_handling": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "nccl_debug": "NCCL_DEBUG",
    "nccl_nthreads": "NCCL_NTHREADS",
    "nccl_ib_timeout": "NCCL_IB_TIMEOUT",
}
_SAMPLED_FIRST = 10


class Logger(TorchLogger):
    """torch's logger for those who pass it on, with data of our own.

    torch's functions that take a logger insist on their own type, and that type on a reducer in
    C++. It gets one that looks after a single parameter which is never used.
    """

    def __init__(self, ddp: Upkeep) -> None:
        self._placeholder = TorchReducer(
            [nn.Parameter(torch.zeros(1))], [[0]], [1 << 20], ddp.process_group
        )
        super().__init__(self._placeholder)
        self._construction = _construction_data(ddp)
        self._runtime: dict[str, Any] = {}
        self._errors: dict[str, Any] = {}
        self._sample_rate = 100
        self._comm_hook = ""
        self._join = 0

    def set_error_and_log(self, error: str) -> None:
        self._errors = {"has_error": 1, "error": error}

    def set_sample_rate(self, rate: int) -> None:
        self._sample_rate = rate

    def _set_comm_hook_name(self, name: str) -> None:
        self._comm_hook = name

    def _set_uneven_input_join(self) -> None:
        self._join = 1

    def _set_static_graph(self) -> None:
        self._construction["static_graph"] = 1

    def sample(self, ddp: Upkeep) -> None:
        """Called before every forward that is meant to be exchanged."""
        iteration = ddp.reducer.stats.iterations
        if iteration and (iteration <= _SAMPLED_FIRST or iteration % self._sample_rate == 0):
            self._runtime = _runtime_data(ddp)

    def data(self, ddp: Upkeep) -> dict[str, Any]:
        """torch's keys with real values."""
        result = dict(self._construction)
        result["join_uneven_inputs"] = self._join
        if self._comm_hook:
            result["comm_hook"] = self._comm_hook
        result["can_set_static_graph"] = int(ddp.reducer.static_graph.unchanged)
        iterations = ddp.reducer.stats.iterations
        if iterations and not self._runtime:
            self._runtime = _runtime_data(ddp)
        result.update(self._runtime)
        result.update(self._errors)
        return result

    def _get_ddp_logging_data(self) -> SimpleNamespace:  # type: ignore[override]
        data = self._construction | self._runtime | self._errors
        strings = {k: v for k, v in data.items() if isinstance(v, str)}
        return SimpleNamespace(
            strs_map=strings, ints_map={k: v for k, v in data.items() if k not in strings}
        )


def _construction_data(ddp: Upkeep) -> dict[str, Any]:
    reducer = ddp.reducer
    planned = [reducer.parameters[n] for n in reducer.fleet.planned]
    kinds = dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in planned)
    data: dict[str, Any] = {
        "world_size": ddp._exchange.size,
        "rank": ddp._exchange.rank,
        "iteration": 0,
        "module_name": type(ddp.module).__name__,
        "backend_name": group_name(ddp.process_group),
        "device_ids": ", ".join(map(str, ddp.device_ids or [])),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "is_multi_device_module": int(ddp.is_multi_device_module),
        "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in ddp.module.modules())),
        "static_graph": int(ddp.static_graph),
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "bucket_sizes": _bucket_sizes(ddp),
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "num_parameter_tensors": len(planned),
        "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in planned),
        "dtypes": ", ".join(_TYPE_NAMES.get(k, k) for k in kinds),
    }
    names = _ENVIRONMENT
    if data["backend_name"] == "gloo":
        data["gloo_num_threads"] = 2
    elif data["backend_name"] == "nccl":
        names = _ENVIRONMENT | _ENVIRONMENT_NCCL
    return data | {key: os.environ.get(name, "N/A") for key, name in names.items()}


_TYPE_NAMES = {
    "float32": "float",
    "float64": "double",
    "float16": "c10::Half",
    "bfloat16": "c10::BFloat16",
    "complex64": "c10::complex<float>",
    "complex128": "c10::complex<double>",
}


def _bucket_sizes(ddp: Upkeep) -> str:
    reducer = ddp.reducer
    return ", ".join(
        str(sum(reducer.candidates[n].spec(n).size_bytes for n in bucket.indices))
        for bucket in reducer.fleet.plan
    )


def _runtime_data(ddp: Upkeep) -> dict[str, Any]:
    reducer, stats = ddp.reducer, ddp.reducer.stats
    counts = reducer.used_counts()
    used = zip(reducer.fleet.planned, counts, strict=False)
    unused = [reducer.parameters[n] for n, count in used if not count]
    data: dict[str, Any] = {
        "iteration": stats.iterations,
        "unused_parameter_size": sum(p.numel() * p.element_size() for p in unused),
        "has_rebuilt_buckets": int(reducer.has_rebuilt_buckets),
        "rebuilt_bucket_sizes": _bucket_sizes(ddp) if reducer.has_rebuilt_buckets else "",
        "rebuilt_per_bucket_param_indices": "; ".join(
            " ".join(str(ddp._index_of(n)) for n in bucket.indices) for bucket in reducer.fleet.plan
        ),
        "prev_iteration_grad_ready_order_indices": ", ".join(
            str(ddp._index_of(n)) for n in reducer.observed
        ),
        "num_buckets_reduced": stats.buckets_reduced,
        "forward_compute_time_start": stats.forward_start_ns,
        "backward_compute_time_start": stats.backward_start_ns,
        "backward_compute_time_end": stats.backward_end_ns,
        "backward_comm_time_start": stats.exchange_start_ns,
        "backward_comm_time_end": stats.exchange_end_ns,
    }
    for name, value in stats.times_ns().items():
        data[name] = value
        data[f"avg_{name}"] = stats.sums_ns[name] // max(1, stats.iterations)
    return data
