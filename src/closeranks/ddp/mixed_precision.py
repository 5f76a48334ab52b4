"""mixed_precision: forward and backward in a smaller type, exchange and optimizer as configured.

Before each forward every parameter's data is replaced by a copy in `param_dtype`; gradients are
accumulated in that type, copied into buckets of the parameter's own type, exchanged in
`reduce_dtype`, and at the end of the backward parameters and gradients are what they were.
torch's own version of this needs an accelerator; this one uses no streams and runs anywhere.
Never run on a GPU.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.utils import _alloc_storage, _cast_forward_inputs, _free_storage
from torch.futures import Future
from torch.nn.parallel.distributed import _cast_buffers, _setup_mixed_precision_params

from closeranks.reducer.reducer import Mode

if TYPE_CHECKING:
    from closeranks.ddp.comm_hook import GradBucket
    from closeranks.reducer.reducer import Reducer


def cast_inputs(config: Any, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
    """Floating point inputs in the type of the parameters."""
    return _cast_forward_inputs(config.param_dtype, *inputs, **kwargs)


class MixedPrecision:
    """The small copies of one module's parameters, and their way back."""

    def __init__(self, config: Any, module: nn.Module, reducer: Reducer) -> None:
        self.config = config
        self._module = module
        self._reducer = reducer
        self._numbers = {p: n for n, p in enumerate(reducer.parameters)}
        self._hooks: list[tuple[Any, Any]] = []
        _setup_mixed_precision_params(config, module)
        _cast_buffers(config, module)
        module.register_forward_pre_hook(self._shrink, prepend=True)

    def _mine(self) -> list[Any]:
        return [p for p in self._module.parameters() if not getattr(p, "_ddp_ignored", False)]

    @torch.no_grad()
    def _shrink(self, _module: nn.Module, _args: Any) -> None:
        """The forward begins: data become small copies, and these announce their gradients."""
        dtype = self.config.param_dtype or torch.get_default_dtype()
        self._forget_hooks()
        for parameter in self._mine():
            _alloc_storage(parameter._mp_param, parameter.size())
            parameter._mp_param.copy_(parameter._fp_param)
            grad, parameter.grad = parameter.grad, None
            parameter.data = parameter._mp_param
            if grad is not None:
                parameter.grad = grad.to(dtype)
            if parameter.requires_grad:
                self._announce(parameter)

    def _announce(self, parameter: Tensor) -> None:
        with torch.enable_grad():
            node: Any = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        fire = functools.partial(self._fire, self._numbers[parameter])
        self._hooks.append((node, node.register_hook(fire)))

    def _fire(self, number: int, *_: object) -> None:
        self._reducer._on_gradient(number)

    def _forget_hooks(self) -> None:
        for _, handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    @torch.no_grad()
    def grow(self) -> None:
        """The backward has ended: data and gradients are in full precision again."""
        self._forget_hooks()
        for parameter in self._mine():
            grad, parameter.grad = parameter.grad, None
            parameter.data = parameter._fp_param
            _free_storage(parameter._mp_param)
            if grad is not None:
                parameter.grad = grad.to(parameter.dtype)

    def after_forward(self) -> None:
        """A forward without a backward to come ends here; else `grow` follows the backward."""
        if not torch.is_grad_enabled() and self._reducer.mode is Mode.IDLE:
            self.grow()

    def hook(self, group: dist.ProcessGroup, bucket: GradBucket) -> Future[Any]:
        """The communication hook: the mean, in reduce_dtype if there is one."""
        buffer = bucket.buffer()
        sent = buffer if self.config.reduce_dtype is None else buffer.to(self.config.reduce_dtype)
        future: Future[Any] = group.allreduce([sent.div_(group.size())]).get_future()
        return future.then(lambda f: f.value()[0].to(buffer.dtype))
