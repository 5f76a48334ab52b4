"""SyncBatchNorm that works on the CPU: batch statistics over the rows of all ranks.

torch's own class refuses CPU tensors. This one is a subclass of it, so that isinstance checks and
converters see what they expect; on a GPU it is torch's. It knows nothing of the reducer.

Forward, in training, with more than one rank:

    1. Each rank computes count, mean and M2 (the sum of squared differences from its mean) of its
       own rows, per channel. A rank without rows has count 0.
    2. One all-gather of these, in float64.
    3. Each rank merges all of them in rank order by Chan's formula, and so gets the same bits.
    4. The running statistics are updated, and the rows normalised, with the merged values.

Backward:

    5. Each rank sums dy and dy * (x - mean) over its own rows. They are the gradients of bias and
       weight, which stay local: DistributedDataParallel averages them with all others.
    6. One all-reduce of the two sums, in float64, if the input needs a gradient.
    7. dx = (dy - sum(dy) / n - (x - mean) * sum(dy * (x - mean)) / (n * (var + eps))) * weight
       / sqrt(var + eps), which is what a single process with all rows would compute.

All ranks must run the same synchronised layers in the same order, forward and backward, and on all
or none of them the input of a layer must need a gradient. A rank whose data has run out must go on
with empty batches: join() cannot run its layers for it. The exchanges run beside the process group
(exchange/beside.py), not on it among the reducer's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from closeranks.errors import ExchangeFailed
from closeranks.exchange.beside import side_group

_PURPOSE = "sync_batchnorm"


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch.nn.SyncBatchNorm, also for CPU tensors; arguments and attributes are torch's.

    As in torch, statistics are exchanged in training only, over `process_group` or the whole
    world; alone, without a process group, or in evaluation it is an ordinary batch norm.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu":
            return super().forward(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        group = self._group_to_exchange_with()
        if group is None:
            return _BatchNorm.forward(self, input)
        if input.size(1) != self.num_features:
            raise ValueError(
                f"SyncBatchNorm expected input with {self.num_features} channels, got "
                f"{input.size(1)} (input of size {tuple(input.shape)})"
            )
        output: Tensor = self._normalise_with(group, input)
        return output

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        return convert_sync_batchnorm(module, process_group)

    # torch.compile breaks the graph here: it cannot look into an exchange.
    @torch.compiler.disable(reason="exchanges statistics")  # type: ignore[untyped-decorator]
    def _normalise_with(self, group: Any, input: Tensor) -> Any:
        tracked = self.track_running_stats
        return _Normalise.apply(
            input,
            self.weight,
            self.bias,
            (self.running_mean, self.running_var) if tracked else (None, None),
            self.eps,
            self._count_batch() if tracked else 0.0,
            group,
        )

    def _group_to_exchange_with(self) -> Any | None:
        """None if there is nobody to exchange with, or no reason to."""
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return None
        group = self.process_group or dist.group.WORLD
        return group if dist.get_world_size(group) > 1 else None

    def _count_batch(self) -> float:
        """The weight of this batch in the running statistics."""
        if self.num_batches_tracked is None:
            return self.momentum or 0.0
        self.num_batches_tracked.add_(1)
        if self.momentum is None:  # the plain average over all batches
            return 1.0 / self.num_batches_tracked.item()
        return self.momentum


def convert_sync_batchnorm(module: nn.Module, process_group: Any = None) -> nn.Module:
    """Make every BatchNorm in module a closeranks.SyncBatchNorm, and return module.

    Unlike torch's converter it changes the class of the layers instead of replacing them, so that
    parameters, buffers, hooks and every reference to a layer stay as they are. Layers that are
    synchronised already keep their process group unless one is given.
    """
    for name, each in module.named_modules():
        if not isinstance(each, _BatchNorm):
            continue
        what = f"cannot convert {name or 'module'}, a {type(each).__name__}"
        if isinstance(each, LazyModuleMixin):
            raise ValueError(f"{what}: its size is not known yet. Run a forward pass first.")
        if is_parametrized(each):
            raise ValueError(f"{what}: convert it first, and register its parametrizations then.")
        if process_group is not None or not isinstance(each, nn.SyncBatchNorm):
            each.process_group = process_group
        if not isinstance(each, SyncBatchNorm):
            each.__class__ = SyncBatchNorm
    return module


def adopt(module: nn.Module) -> None:
    """Let layers that torch's converter made work on the CPU: torch's class becomes ours, in place.

    Layers that hold a tensor on another device, and subclasses of the user's own, stay theirs.
    """
    for each in module.modules():
        tensors = [*each.parameters(recurse=False), *each.buffers(recurse=False)]
        if type(each) is nn.SyncBatchNorm and all(t.device.type == "cpu" for t in tensors):
            each.__class__ = SyncBatchNorm


class _Normalise(torch.autograd.Function):
    """Steps 1 to 7 of the module docstring. Statistics are float64, or float32 inside kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: tuple[Tensor | None, Tensor | None],
        eps: float,
        momentum: float,
        group: Any,
    ) -> Tensor:
        x = x.contiguous(memory_format=_memory_format(x))
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        count, mean, var = _merge(_gather(_local_statistics(x, dtype), group))  # 1, 2, 3
        if count == 0:
            ctx.count = 0
            return torch.empty_like(x)
        if count == 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, got 1 on all ranks together "
                f"(this rank's input has size {tuple(x.shape)})"
            )
        unbiased = var * (count / (count - 1))
        for statistic, value in zip(running, (mean, unbiased), strict=True):  # 4
            if statistic is not None:
                statistic.copy_(statistic.double() * (1.0 - momentum) + value * momentum)
        mean, var = mean.to(dtype), var.to(dtype)
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt())
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.count, ctx.eps, ctx.group = count, eps, group
        if x.numel() == 0:
            return torch.empty_like(x)
        scale = None if weight is None else weight.to(dtype)
        shift = None if bias is None else bias.to(dtype)
        output: Tensor = torch.native_batch_norm(x, scale, shift, mean, var, False, 0.0, eps)[0]
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.count == 0:
            return torch.zeros_like(dy), *[None] * 6
        x, weight, mean, invstd = ctx.saved_tensors
        needs_dx, needs_dweight, needs_dbias = ctx.needs_input_grad[:3]
        sum_dy, sum_dy_xhat = _local_sums(x, dy, mean, invstd, ctx.eps)  # 5
        dweight = sum_dy_xhat.to(weight.dtype) if needs_dweight else None
        dbias = sum_dy.to(ctx.bias_dtype) if needs_dbias else None
        dx = None
        if needs_dx:
            sums = torch.stack([sum_dy, sum_dy_xhat]).double()
            _exchange(side_group(ctx.group, _PURPOSE).allreduce, [sums])  # 6
            by_x, by_xhat = (sums / ctx.count).to(mean.dtype)
            factor = invstd if weight is None else invstd * weight  # 7
            shape = [1, -1, *[1] * (x.dim() - 2)]
            dx = x - mean.view(shape)
            dx.mul_((-invstd * factor * by_xhat).view(shape)).sub_((factor * by_x).view(shape))
            dx = dx.add_(dy * factor.view(shape)).to(x.dtype)
        return dx, dweight, dbias, *[None] * 4


def _memory_format(x: Tensor) -> torch.memory_format:
    """The layout in which the kernels below are fast and sum in high precision."""
    for channels_last in (torch.channels_last, torch.channels_last_3d):
        if x.dim() == (4 if channels_last is torch.channels_last else 5) and x.is_contiguous(
            memory_format=channels_last
        ):
            return channels_last
    return torch.contiguous_format


def _local_statistics(x: Tensor, dtype: torch.dtype) -> Tensor:
    """This rank's [mean..., M2..., count] in float64."""
    channels = x.size(1)
    if x.numel() == 0:
        return torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    count = x.numel() // channels
    # Running statistics that are thrown away: they tell the kernel to compute in this dtype.
    unused = torch.zeros(2, channels, dtype=dtype, device=x.device)
    mean, var = torch.batch_norm_update_stats(x, unused[0], unused[1], 0.0)
    counted = torch.tensor([float(count)], dtype=torch.float64, device=x.device)
    return torch.cat([mean.double(), var.double() * count, counted])


def _gather(mine: Tensor, group: Any) -> list[Tensor]:
    everyones = [torch.empty_like(mine) for _ in range(group.size())]
    _exchange(side_group(group, _PURPOSE).allgather, [everyones], [mine])
    return everyones


def _merge(everyones: list[Tensor]) -> tuple[int, Tensor, Tensor]:
    """Count, mean and biased variance of all rows, merged pair by pair in rank order (Chan)."""
    channels = everyones[0].numel() // 2
    count = 0
    mean = m2 = everyones[0].new_zeros(channels)
    for each in everyones:
        mean_b, m2_b, count_b = each[:channels], each[channels:-1], int(each[-1])
        if count_b == 0:
            continue
        delta, total = mean_b - mean, count + count_b
        mean = mean + delta * (count_b / total)
        m2 = m2 + m2_b + delta * delta * (count * count_b / total)
        count = total
    return count, mean, m2 / max(count, 1)


def _local_sums(
    x: Tensor, dy: Tensor, mean: Tensor, invstd: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Sums over this rank's rows of dy, and of dy * (x - mean) * invstd."""
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    dy = dy.contiguous(memory_format=_memory_format(x))
    ones = torch.ones_like(mean)
    _, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
        dy, x, ones, None, None, mean, invstd, True, eps, [False, True, True]
    )
    return dbias, dweight


def _exchange(collective: Any, *tensors: Any) -> None:
    try:
        collective(*tensors).wait()
    except RuntimeError as error:
        raise ExchangeFailed(
            f"the exchange of SyncBatchNorm statistics failed: {error}. Every rank must run the "
            "same SyncBatchNorm layers in the same order, with an empty batch if it has no rows "
            "left; look at the ranks that did not, or died."
        ) from error
