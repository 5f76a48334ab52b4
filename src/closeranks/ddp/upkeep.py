"""What is done to a wrapped module between steps: hooks, modes, join, logging data, copies.

The half of the class that a training step does not pass through. Torch's names, each a few lines
over our parts. The other half is `wrapper`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BucketCapacityConfig

from closeranks.ddp import buffers, copying, options, wire_state
from closeranks.ddp.comm_hook import Hook, builtin_hook, check_hook
from closeranks.ddp.uneven import ShadowHook
from closeranks.wire.formats import EXACT

if TYPE_CHECKING:
    from closeranks.ddp.delayed import DelayedParameters
    from closeranks.ddp.logging_data import Logger
    from closeranks.ddp.mixed_precision import MixedPrecision
    from closeranks.ddp.torch_names import TorchNamedReducer
    from closeranks.exchange.base import Exchange
    from closeranks.reducer.waiting import Waiter

_ONCE = "register_comm_hook or register_builtin_comm_hook can only be called once."


class Upkeep(TorchDDP):
    """Everything about a wrapped module but the step itself."""

    # torch's class has attributes of these names and other types.
    reducer: TorchNamedReducer  # type: ignore[assignment]
    logger: Logger
    average: bool | Callable[[], float]
    wire: str
    _exchange: Exchange
    _waiter: Waiter
    divides_by_initial_size: bool  # set by join()
    _delayed: DelayedParameters | None
    _mixed: MixedPrecision | None

    _bucket_config: _BucketCapacityConfig

    def _make_reducer(self, static_graph: bool, alone: bool = False) -> None:
        """Make everything that belongs to this process and its group."""
        raise NotImplementedError

    def _set_torch_attributes(self) -> None:
        """Attributes that others read, or that inherited methods use."""
        config = self._bucket_config
        self.bucket_bytes_cap = config.bucket_bytes_cap
        self.bucket_bytes_cap_list = list(config.per_bucket_bytes_caps)
        self.bucket_bytes_cap_default = config.first_bucket_bytes_cap < config.bucket_bytes_cap
        self.broadcast_bucket_size = 250 * 1024 * 1024
        self.use_side_stream_for_tensor_copies = options.side_stream_wanted()
        self._use_python_reducer = False
        self._comm_hooks: list[tuple[Callable[..., Any], object]] = []
        self._lazy_init_ran = False
        self._ddp_sink_clone = True
        self._delayed = None
        self._mixed = None

    # Hooks.

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Have `hook(state, bucket)` exchange each bucket instead of us; once only."""
        self._refuse_hook(lambda: check_hook(hook))
        self._install_hook(Hook(state, hook))
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        self._refuse_hook(lambda: None)
        self._install_hook(builtin_hook(comm_hook_type, self.process_group))

    def _refuse_hook(self, check: Callable[[], None]) -> None:
        """Log and raise what makes a hook impossible now."""
        try:
            check()
            if self.reducer.hook is not None:
                raise RuntimeError(f"{_ONCE} Compose hooks in one function instead.")
            if self.wire != EXACT:
                raise ValueError(
                    f"A communication hook decides itself in which format gradients travel, but "
                    f"wire={self.wire!r} was asked for. Leave out the hook, or wire= and "
                    "CLOSERANKS_WIRE."
                )
            if self.average is not True:
                raise ValueError(
                    "A communication hook decides itself how gradients are combined; average= "
                    "must be left out. Weigh inside the hook, or use average without a hook."
                )
        except (TypeError, ValueError, RuntimeError) as error:
            self.logger.set_error_and_log(f"{type(error)}: {error}")
            raise

    def _install_hook(self, hook: Hook) -> None:
        self.reducer.set_hook(hook)
        self.logger._set_comm_hook_name(hook.name)

    # Modes and maintenance.

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again.", stacklevel=2
            )
            return
        if self.reducer.stats.iterations:
            self._log_and_throw(
                RuntimeError,
                "set_static_graph() should be called before training loop starts. Pass "
                "static_graph=True to the constructor.",
            )
        self.static_graph = True
        self.reducer.static_graph.expected = True
        self.logger._set_static_graph()
        if self.find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=true to DistributedDataParallel, "
                "`_set_static_graph` will detect unused parameters automatically, so you do not "
                "need to set find_unused_parameters=true, just be sure these unused parameters "
                "will not change during training loop while calling `_set_static_graph`.",
                stacklevel=2,
            )

    def _distributed_broadcast_coalesced(
        self, tensors: Any, buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        buffers.broadcast(tensors, authoritative_rank, buffer_size, self._exchange, self._waiter)

    @property
    def _has_rebuilt_buckets(self) -> bool:  # type: ignore[override]
        return self.reducer.has_rebuilt_buckets

    def _shadow_exchange(self) -> None:
        """Take part in an exchange of the others with zeros, and keep nothing of it."""
        self.reducer.shadow()

    def join_hook(self, **kwargs: Any) -> ShadowHook:
        return ShadowHook(self, kwargs.get("divide_by_initial_world_size", True))

    def _index_of(self, number: int) -> int:
        """torch's index of a parameter: its place among those that need a gradient."""
        return self.reducer.fleet.place[number]

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return self.logger.data(self)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            self._log_and_throw(
                ValueError,
                "DDP runtime logging sample rate should be equal or greater than 1, "
                f"got {sample_rate}.",
            )
        self.logger.set_sample_rate(sample_rate)

    def _update_process_group(self, new_process_group: Any) -> None:
        """Go on in another group; a registered hook keeps the group in its own state."""
        hook = self.reducer.hook
        self.reducer.close()
        if not dist.distributed_c10d._rank_not_in_group(new_process_group):
            self.process_group = new_process_group
            self._make_reducer(self.static_graph)
            if hook is not None:
                self._install_hook(hook)

    # What a wire format has not sent yet.

    def wire_state_dict(self) -> dict[str, Any]:
        """What this rank has to remember so that a resumed run goes on to the same bits.

        Every rank has its own, and saves it beside the model; it is no part of state_dict().
        """
        return wire_state.save(self.reducer, self.wire)

    def load_wire_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what wire_state_dict() of the same rank said; all ranks do so at once."""
        wire_state.load(state, self.reducer, self.wire)

    # Copies.

    def __getstate__(self) -> dict[str, Any]:
        return copying.portable_state(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        group = state.pop("_live_group", None)
        ranks = state.pop("_group_ranks", None)
        state.pop("broadcast_buffers", None)
        hooks = state.pop("_comm_hooks", [])
        nn.Module.__setstate__(self, state)
        Joinable.__init__(self)
        self.process_group = copying.find_group(ranks) if group is None else group
        self._comm_hooks = []
        self._delayed = self._mixed = None
        self._make_reducer(self.static_graph, alone=True)
        for hook, hook_state in hooks:
            self.register_comm_hook(hook_state, hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> Upkeep:
        state = self.__getstate__()
        hooks = state.pop("_comm_hooks")  # Their states belong to groups, which are not copied.
        state = copy.deepcopy(state, memo)
        state["_comm_hooks"] = hooks
        state["_live_group"] = self.process_group
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(state)
        return twin
