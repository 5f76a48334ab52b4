"""Lets tests for GPUs run on the CPU: every device becomes the CPU, nccl becomes gloo.

Most of torch's DDP tests ask for GPUs although what they test has nothing to do with a device.
In three steps:

1. torch.cuda and torch.accelerator claim eight devices; streams and events do nothing.
2. Functions that name a device get the CPU instead; process groups get gloo instead of nccl.
3. torch's test classes believe that all they need is there, and run with 2 in force.

Changes torch for the whole process: call it only in a worker, before torch's tests are imported.
Whose class is under test makes no difference here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.testing._internal.common_distributed as common
from torch.overrides import TorchFunctionMode

_DEVICES = 8
_CPU = torch.device("cpu")

_MEANINGLESS = (
    (r"SyncBatchNorm|sync_bn|test_ddp_inference$", "torch's SyncBatchNorm itself needs a GPU"),
    (r"test_ddp_device$|test_ddp_logging_data_gpu$", "checks on which device things are"),
)


def meaningless(test: str) -> str:
    """Why the test means nothing on the CPU, or an empty string."""
    return next((why for pattern, why in _MEANINGLESS if re.search(pattern, test)), "")


def install() -> None:
    _claim_devices()  # step 1
    _redirect_modules()  # step 2
    _redirect_process_groups()  # step 2
    _satisfy_requirements()  # step 3


class OnCpu(TorchFunctionMode):
    """Step 2 for tensors: calls of torch that name a device get the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "cuda" and args and isinstance(args[0], torch.Tensor):
            return args[0]
        if func is torch.device:
            return func(*args, **kwargs) if args in ((), ("meta",)) else _CPU
        if "device" in kwargs:
            kwargs["device"] = _as_cpu(kwargs["device"])
        if name == "to" and len(args) > 1:
            args = (args[0], _as_cpu(args[1]), *args[2:])
        if name == "load" and "map_location" in kwargs:
            kwargs["map_location"] = "cpu"
        return func(*args, **kwargs)


class _Idle:
    """Stands for a stream, an event or a device guard; accepts everything and does nothing."""

    device = _CPU
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: 0


def _as_cpu(value: Any) -> Any:
    """The CPU if the value means a GPU (an index does), else the value itself."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int) or (isinstance(value, torch.device) and value.type == "cuda"):
        return _CPU
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    return value


def _claim_devices() -> None:
    """Each name gets a function of its own, for torch.compile looks functions up by identity."""
    cuda: Any = torch.cuda
    cuda.device_count = lambda: _DEVICES
    cuda.current_device = lambda: int(os.environ.get("RANK", 0))
    cuda.device = cuda.Stream = cuda.Event = _Idle
    cuda.current_stream = lambda *args: _Idle()
    cuda.default_stream = lambda *args: _Idle()
    cuda.stream = lambda *args: contextlib.nullcontext()
    cuda.nccl.version = lambda: (2, 27, 0)
    accelerator: Any = torch.accelerator
    accelerator.device_count = lambda: _DEVICES
    accelerator.current_device_index = lambda: 0
    accelerator.current_stream = lambda *args: _Idle()
    everything: Any = torch
    everything.Stream = everything.Event = _Idle
    for namespace, name in (
        (cuda, "set_device"),
        (cuda, "synchronize"),
        (cuda, "empty_cache"),
        (cuda, "_sleep"),
        (accelerator, "set_device_index"),
        (accelerator, "set_device_idx"),
        (accelerator, "synchronize"),
    ):
        setattr(namespace, name, lambda *args, **kwargs: None)


def _redirect_modules() -> None:
    module: Any = torch.nn.Module
    original = module.to

    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_as_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _as_cpu(kwargs["device"])
        return original(self, *args, **kwargs)

    module.to = to
    module.cuda = lambda self, device=None: self


def _redirect_process_groups() -> None:
    namespaces: tuple[Any, ...] = (dist, c10d)
    for namespace in namespaces:
        for name in ("init_process_group", "new_group"):
            setattr(namespace, name, _with_gloo(getattr(c10d, name)))
        namespace.is_nccl_available = lambda: True
        if not hasattr(namespace, "ProcessGroupNCCL"):
            namespace.ProcessGroupNCCL = _NoProcessGroup


class _NoProcessGroup:
    """No process group is an instance of it."""


def _with_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        args = tuple("gloo" if value == "nccl" else value for value in args)
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return function(*args, **kwargs)

    return wrapper


def _satisfy_requirements() -> None:
    def keep(test: Any) -> Any:
        return test

    module: Any = common
    module.skip_if_no_gpu = keep
    for name in (
        "skip_if_lt_x_gpu",
        "nccl_skip_if_lt_x_gpu",
        "require_n_gpus_for_nccl_backend",
        "requires_nccl",
        "requires_nccl_version",
    ):
        setattr(module, name, lambda *args, **kwargs: keep)
    module.init_multigpu_helper = lambda world_size, backend: {i: [i] for i in range(world_size)}
    run_test = common.MultiProcessTestCase.run_test

    def run_test_on_cpu(self: Any, *args: Any) -> None:
        with OnCpu():
            run_test(self, *args)

    module.MultiProcessTestCase.run_test = run_test_on_cpu
