"""What the constructor accepts: torch's arguments and ours, checked once, before anything is done.

Every refusal keeps torch's words, since scripts and tests match them, and adds what to do.
Knows arguments; must not know the reducer.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _BucketCapacityConfig

from closeranks.wire.formats import EXACT

logger = logging.getLogger("closeranks")


@dataclass(frozen=True)
class Devices:
    """Where the module lives, and where its inputs go."""

    device_type: str
    multi: bool
    device_ids: list[int] | None
    output_device: int | None


def check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"DistributedDataParallel: module must be a torch.nn.Module, got "
            f"{type(module).__name__}. Pass the model itself, not its output or its class."
        )


def resolve_group(module: nn.Module, process_group: Any, device_mesh: Any) -> dist.ProcessGroup:
    """The group of the replicas: given, of a 1-D mesh, or the default one."""
    if process_group is not None and device_mesh is not None:
        raise RuntimeError(
            "Cannot specify both process_group and device_mesh arguments. Leave one of them out."
        )
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(
                f"Only 1D device mesh is supported, but got {device_mesh}. "
                "Pass the dimension that replicates, as in mesh['dp']."
            )
        if device_mesh._get_root_mesh() != device_mesh:
            from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

            _pre_dp_module_transform(module)
        group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
        return group
    if process_group is not None:
        if process_group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "DistributedDataParallel: this process is not a member of process_group. "
                "Wrap the module only on the ranks that were passed to new_group()."
            )
        return process_group  # type: ignore[no-any-return]
    if not dist.is_initialized():
        raise ValueError(
            "Default process group has not been initialized, please make sure to call "
            "init_process_group. Call torch.distributed.init_process_group('gloo') before "
            "wrapping, and start the script with torchrun."
        )
    default: dist.ProcessGroup = dist.distributed_c10d._get_default_group()
    return default


def check_parameters(parameters: Sequence[Tensor], delayed_count: int) -> None:
    for parameter in parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with "
                "`DistributedDataParallel`. Run a dummy forward pass to correctly initialize "
                "the modules before wrapping."
            )
    if any(p.requires_grad for p in parameters):
        return
    if not delayed_count:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that "
            "requires a gradient. Use the module itself, or set requires_grad before wrapping."
        )
    logger.info("Delay the AllReduce of all parameters.")


def resolve_devices(
    parameters: Sequence[Tensor], device_ids: Sequence[Any] | None, output_device: Any
) -> Devices:
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            "device_ids can only be None or contain a single element. Start one process for "
            f"each device instead; got {list(device_ids)}."
        )
    types = {p.device.type for p in parameters}
    if len(types) != 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but "
            f"input module parameters locate in {types}. Move it with module.to(device) first."
        )
    device_type = next(iter(types))
    multi = len({p.device for p in parameters}) > 1
    if not device_ids or device_type == "cpu" or multi:
        if device_ids or output_device:
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
                f"{device_ids}, output_device {output_device}, and module parameters "
                f"{ {p.device for p in parameters} }. Leave both out for this module."
            )
        return Devices(device_type, multi, None, None)
    index = torch._utils._get_device_index
    ids = [index(d, True) for d in device_ids]
    return Devices(device_type, multi, ids, index(output_device or device_ids[0], True))


def resolve_buffer_sync(broadcast: bool | None, forward: bool | None) -> tuple[bool, bool]:
    """Whether buffers follow rank 0 in forwards, and whether they do so at the start."""
    if broadcast is not None:
        if forward is not None:
            text = (
                "Both `broadcast_buffers` and `forward_sync_buffers` were specified. "
                "`broadcast_buffers` is deprecated and its value is ignored when "
                "`forward_sync_buffers` is provided. Leave `broadcast_buffers` out."
            )
        else:
            text = (
                "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead. "
                "`forward_sync_buffers=False` still syncs buffers at init; keep "
                "`broadcast_buffers=False` if buffers must stay different from the start."
            )
        warnings.warn(text, FutureWarning, stacklevel=3)
    if forward is not None:
        return forward, True
    value = True if broadcast is None else broadcast
    return value, value


def resolve_caps(
    cap_mb: float | None, cap_mb_list: Iterable[float] | None
) -> tuple[_BucketCapacityConfig, tuple[int, ...]]:
    """torch's bucket configuration, and our caps in launch order."""
    caps_mb = [] if cap_mb is None else [cap_mb]
    for cap in [*caps_mb, *(cap_mb_list or [])]:
        if not cap > 0:
            raise ValueError(f"bucket_cap_mb: got {cap}, wanted a size in MiB above 0.")
    mode = torch._dynamo.utils.get_optimize_ddp_mode()
    config = _BucketCapacityConfig.create(
        bucket_cap_mb=cap_mb,  # type: ignore[arg-type]
        bucket_cap_mb_list=cap_mb_list,  # type: ignore[arg-type]
        use_python_reducer=mode == "python_reducer",
    )
    if config.per_bucket_bytes_caps:
        return config, config.per_bucket_bytes_caps
    if os.environ.get("DDP_SET_LAST_BUCKET_CAP", "1") == "0":
        return config, (config.bucket_bytes_cap,)
    return config, (config.first_bucket_bytes_cap, config.bucket_bytes_cap)


def check_average(average: object) -> bool | Callable[[], float]:
    if isinstance(average, bool) or callable(average):
        return average
    raise TypeError(
        f"average: got {average!r}, wanted True (mean), False (sum) or a function fn() -> float "
        "that returns this rank's weight."
    )


def resolve_wire(wire: object) -> str:
    """The wire format asked for; whether there is such a one is found out by all ranks together."""
    return str(wire) if wire is not None else os.environ.get("CLOSERANKS_WIRE") or EXACT


def check_wire_alone(wire: str, mixed_precision: object) -> None:
    if wire != EXACT and mixed_precision is not None:
        raise ValueError(
            f"wire={wire!r} with mixed_precision: that exchanges gradients by a hook of its own, "
            "in its reduce_dtype. Leave one of them out."
        )


def check_delayed(named: object, trigger: object) -> None:
    if (named is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the "
            "same time. Pass both or neither."
        )


def side_stream_wanted() -> bool:
    """Whether inputs are copied to a GPU on a stream of their own (torch's switch)."""
    return os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
