"""DistributedDataParallel: the class that users wrap their module in.

It subclasses torch's class, so that isinstance checks all over torch and its companions hold, but
runs none of torch's reducer: its constructor makes ours. What is inherited on purpose is listed,
with reasons, in tests/tidy/test_torch_surface.py.

The rest of the class, which no step passes through, is `upkeep`.

One step, in the order of the code: `forward` (buffers follow rank 0, the module runs, outputs are
watched), then the user's backward, in which the reducer works, then the user's optimizer.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable

from closeranks.ddp import (
    logging_data,
    optimizers,
    options,
    outputs,
    parameters,
    replicate,
    sync_batchnorm,
)
from closeranks.ddp.delayed import DelayedParameters
from closeranks.ddp.mixed_precision import MixedPrecision, cast_inputs
from closeranks.ddp.torch_names import TorchNamedReducer
from closeranks.ddp.upkeep import Upkeep
from closeranks.exchange.attendance import Attendance
from closeranks.exchange.choose import choose
from closeranks.exchange.late import LateExchange
from closeranks.reducer.options import ReducerOptions
from closeranks.reducer.waiting import Waiter
from closeranks.wire.formats import EXACT


class DistributedDataParallel(Upkeep):
    """Data parallelism for a module: every rank holds a replica, gradients are averaged.

    The arguments are torch's, in torch's order, and mean what they mean there. Ours:

    Args:
        average: True averages gradients over ranks, False sums them. A function `fn() -> float`
            gives this rank's weight, once for each exchange: the result is sum(w*g)/sum(w), and
            zero if all weights are zero. Excludes a communication hook.
        warn_after_s: after so long a wait for other ranks, a warning of the logger "closeranks"
            names the bucket, its parameters, and the ranks that did not come.
        wire: the format of gradients on their way from host to host: "exact" (the default),
            "bf16", "fp16", "int8", "powersgd:RANK", or "auto" to have one chosen by measurement.
            What a format cannot hold is sent later. CLOSERANKS_WIRE does the same for a program
            that does not say. Excludes a communication hook.

    Parameters that a backward does not reach need no flag; find_unused_parameters=True lets
    buckets fly earlier where the used parameters vary. `autograd.grad` is never exchanged.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        average: bool | Callable[[], float] = True,
        warn_after_s: float = 30.0,
        wire: str | None = None,
    ) -> None:
        options.check_module(module)
        options.check_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self.average = options.check_average(average)
        self.warn_after_s = warn_after_s
        self.wire = options.resolve_wire(wire)
        options.check_wire_alone(self.wire, mixed_precision)
        self.process_group = options.resolve_group(module, process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        if check_reduction:
            warnings.warn(
                "The `check_reduction` argument in `DistributedDataParallel` module is "
                "deprecated. Please avoid using it.",
                FutureWarning,
                stacklevel=2,
            )

        # Which parameters are whose.
        delayed = list(delay_all_reduce_named_params or [])
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.parameters_to_ignore |= {name for name, _ in delayed}
        self._delay_all_reduce_params = [parameter for _, parameter in delayed]
        self._module_parameters = [
            p for name, p in module.named_parameters() if name not in self.parameters_to_ignore
        ]
        options.check_parameters(self._module_parameters, len(delayed))
        everything = self._module_parameters or self._delay_all_reduce_params
        devices = options.resolve_devices(everything, device_ids, output_device)
        self.device_type, self.is_multi_device_module = devices.device_type, devices.multi
        self.device_ids, self.output_device = devices.device_ids, devices.output_device
        self.device = everything[0].device

        # What was asked for.
        self.module = module
        self.dim = dim
        self.static_graph = False
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.mixed_precision = mixed_precision
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.forward_sync_buffers, init_sync_buffers = options.resolve_buffer_sync(
            broadcast_buffers, forward_sync_buffers
        )
        self._bucket_config, self._caps_bytes = options.resolve_caps(
            bucket_cap_mb, bucket_cap_mb_list
        )
        self._set_torch_attributes()
        sync_batchnorm.adopt(module)

        # The parts that work.
        self._make_reducer(static_graph)
        if delayed:
            self._delayed = DelayedParameters(
                self._delay_all_reduce_params,
                param_to_hook_all_reduce,
                self._exchange,
                self._waiter,
                self._wants_sync_function(),
            )
        if init_sync:
            self._replicate(init_sync_buffers)
        if mixed_precision is not None:
            self._mixed = MixedPrecision(mixed_precision, module, self.reducer)
            self.register_comm_hook(self.process_group, self._mixed.hook)
            self.reducer.on_backward_done = self._mixed.grow
        if static_graph:
            self._set_static_graph()

    def _wants_sync_function(self) -> Callable[[], bool]:
        """Whether gradients are to be exchanged, for parts that must not keep this object alive."""
        reference = weakref.ref(self)

        def wants_sync() -> bool:
            ddp = reference()
            return ddp is not None and ddp.require_backward_grad_sync

        return wants_sync

    def _make_reducer(self, static_graph: bool, alone: bool = False) -> None:
        """Everything of this process; alone: the other ranks may not be here now."""
        self._assign_modules_buffers()
        attendance = Attendance(self.process_group)
        self._waiter = Waiter(attendance, self.warn_after_s)
        make = functools.partial(
            choose, self.process_group, self.device, self._waiter.wait, self.wire
        )
        exact = self.wire == EXACT
        self._exchange = LateExchange(self.process_group, make, exact) if alone else make()
        self._waiter.at_end = self._exchange.close
        candidates = parameters.candidates(self.module, self.parameters_to_ignore)
        synced_norm = any(isinstance(m, nn.SyncBatchNorm) for m in self.module.modules())
        self.reducer = TorchNamedReducer(
            candidates,
            self._exchange,
            self._waiter,
            ReducerOptions(
                caps_bytes=self._caps_bytes,
                average=self.average,
                as_view=self.gradient_as_bucket_view,
                batched=self.batched_grad_copy,
                static_graph=static_graph,
                find_unused=self.find_unused_parameters and self.mixed_precision is None,
                skip_unused=self.skip_all_reduce_unused_params,
                # Collectives of the module's own backward must meet ours in the same order on
                # every rank, also where ranks use different parameters.
                hold=synced_norm and self.find_unused_parameters,
                hold_first=synced_norm,
            ),
            self._wants_sync_function(),
        )
        self.reducer.is_replaced = parameters.replacement_check(self.module, candidates)
        # Hooks on parameters keep the reducer alive, so it has to end with the wrapper.
        weakref.finalize(self, self.reducer.close).atexit = False
        optimizers.settle_before_steps(self.reducer)
        self.logger = logging_data.Logger(self)
        log_error = self.logger.set_error_and_log
        self.reducer.on_error = lambda error: log_error(f"{type(error)}: {error}")

    def _replicate(self, buffers_too: bool) -> None:
        """Compare the models of all ranks, then take rank 0's values."""
        ignored = self.parameters_to_ignore
        named = [(c.name, c.parameter) for c in self.reducer.candidates]
        buffers = list(self.named_module_buffers.items()) if buffers_too else []
        average = self.average if isinstance(self.average, bool) else "fn"
        delayed = {id(parameter) for parameter in self._delay_all_reduce_params}
        settings = {
            "bucket_cap_mb": [cap / (1 << 20) for cap in self._caps_bytes],
            "average": average,
            "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
            "delayed": sorted(n for n, p in self.module.named_parameters() if id(p) in delayed),
        }
        own = replicate.describe(named, buffers, settings)
        replicate.compare(own, self._exchange, self._waiter, self.device)
        dist.utils._sync_module_states(
            module=self.module,
            process_group=self.process_group,
            broadcast_bucket_size=self.broadcast_bucket_size,
            src=0,
            params_and_buffers_to_ignore=ignored,
            broadcast_buffers=buffers_too,
        )
        if self._delayed is not None:
            self._delayed.broadcast()

    @property
    def exchange(self) -> str:
        """Which way gradients take between ranks, in a few words."""
        return self._exchange.way

    # One step.

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self._lazy_init_ran:
            self._lazy_init()
        if torch.is_grad_enabled():
            if self.require_backward_grad_sync:
                self.logger.sample(self)
            self.reducer.note_forward(self.require_backward_grad_sync, self.training)
        work = Join.notify_join_context(self)
        if self._join_config.enable:
            self.reducer.scale.expect_joined(work, self.divides_by_initial_size)
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self._join_config.enable:
            self._check_global_requires_backward_grad_sync(is_joined_rank=False)
        if self.device_ids:
            moved, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            inputs, kwargs = moved[0], moved_kwargs[0]
        if self.mixed_precision is not None:
            inputs, kwargs = cast_inputs(self.mixed_precision, inputs, kwargs)
        return inputs, kwargs

    def _post_forward(self, output: Any) -> Any:
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        if self._mixed is not None:
            self._mixed.after_forward()
        if not torch.is_grad_enabled():
            self.require_forward_param_sync = False
            return output
        self.require_forward_param_sync = self.require_backward_grad_sync
        training = self.training and self.require_backward_grad_sync
        return outputs.watch(output, training, self.reducer.on_output_gradient)

    def _lazy_init(self) -> None:
        """At the first forward: take over optimizers that step inside the backward."""
        self._lazy_init_ran = True
        stepping = optimizers.take_over_in_backward(self._module_parameters)
        if stepping:
            self.reducer.at_end = lambda: optimizers.step_in_backward(stepping)
