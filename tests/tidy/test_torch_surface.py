"""Every attribute of torch's DistributedDataParallel is ours, or inherited for a stated reason.

Our class subclasses torch's so that isinstance keeps working, but it never runs torch's
constructor. A method of torch's that we forgot would therefore run on an object that was never
built for it. This test reads both classes and nothing else: what torch's class itself defines must
be defined by our class or a base of it that stands before torch's, or be listed below.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch.nn.parallel

THEIRS = torch.nn.parallel.DistributedDataParallel

# What every class statement leaves behind says nothing about behaviour.
BOOKKEEPING = frozenset(
    {
        "__abstractmethods__",
        "__annotations__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__module__",
        "__static_attributes__",
        "__weakref__",
        "_abc_impl",
    }
)

_NEVER_RUN = "only torch's constructor and forward lead there, and neither runs on our object"
_BUFFERS = "buffers follow rank 0 as in torch, by broadcasts over the attributes that we set"
_JOIN = "part of torch's join protocol; it reaches the reducer through our join_hook alone"
_FORWARDS = "one call of a method of ddp.reducer, which ours has"

# name -> why torch's own may run on our object.
INHERITED: dict[str, str] = {
    "_active_ddp_module": "torch.compile reads it on torch's own class, so it is set there",
    "_assign_modules_buffers": _BUFFERS,
    "_build_debug_param_to_name_mapping": "a function of the module and parameters_to_ignore",
    "_build_params_for_reducer": "a function of the module and parameters_to_ignore",
    "_check_and_sync_module_buffers": _JOIN,
    "_check_comm_hook": "nobody calls it: register_comm_hook and its check are ours",
    "_check_default_group": "nobody calls it: pickling is ours",
    "_check_global_requires_backward_grad_sync": _JOIN,
    "_check_reducer_finalized": _FORWARDS,
    "_check_sync_bufs_post_fwd": _BUFFERS,
    "_check_sync_bufs_pre_fwd": _BUFFERS,
    "_clear_grad_buffer": _NEVER_RUN,
    "_ddp_init_helper": _NEVER_RUN,
    "_default_broadcast_coalesced": _BUFFERS,
    "_delayed_all_reduce_hook": _NEVER_RUN,
    "_distributed_rank": "the rank in process_group",
    "_find_common_rank": _JOIN,
    "_fire_reducer_autograd_hook": _NEVER_RUN,
    "_get_active_ddp_module": "a classmethod that reads _active_ddp_module and nothing else",
    "_get_data_parallel_params": "a static function of a module that knows no wrapper",
    "_get_parameters": "a function of a module that knows no wrapper",
    "_inside_ddp_forward": "sets _active_ddp_module where torch.compile reads it",
    "_log_and_throw": "logs through self.logger, which ours has, and raises",
    "_match_all_reduce_for_bwd_pass": "nobody calls it: our join_hook shadows whole exchanges",
    "_match_unused_params_allreduce": "nobody calls it: our join_hook shadows whole exchanges",
    "_module_wait_for_copy_hook": _NEVER_RUN,
    "_passing_sync_batchnorm_handle": _NEVER_RUN,
    "_register_accum_grad_hook": _NEVER_RUN,
    "_register_buffer_comm_hook": "keeps the hook that the inherited buffer methods call",
    "_register_delay_all_reduce_hook": _NEVER_RUN,
    "_register_fused_optim": "registers a communication hook through our register_comm_hook",
    "_remove_autograd_hooks": _FORWARDS,
    "_root_copy_hook": _NEVER_RUN,
    "_run_ddp_forward": "runs the module inside _inside_ddp_forward",
    "_set_ddp_sink_clone": "about copies of outputs; ours returns the outputs themselves",
    "_set_params_and_buffers_to_ignore_for_model": "a static function that marks a module",
    "_set_sparse_metadata": "one call of the reducer, which says that there is none to set",
    "_setup_in_backward_optimizers": _NEVER_RUN,
    "_sync_buffers": _BUFFERS,
    "_sync_final_model": _JOIN,
    "_sync_module_buffers": _BUFFERS,
    "broadcast_buffers": "the older name of forward_sync_buffers",
    "gather": "a function of its arguments and dim, which our constructor sets",
    "join": _JOIN,
    "join_device": _JOIN,
    "join_process_group": _JOIN,
    "no_sync": "sets require_backward_grad_sync and restores it, also on exceptions",
    "scatter": "a function of its arguments and attributes that our constructor sets",
    "to_kwargs": "a function of its arguments and attributes that our constructor sets",
    "train": "that of nn.Module",
    "will_sync_module_buffers": _BUFFERS,
}


def surface(cls: type) -> set[str]:
    """What a class itself defines, without the bookkeeping and what merely repeats object."""
    return {
        name
        for name, value in vars(cls).items()
        if name not in BOOKKEEPING and value is not vars(object).get(name, BOOKKEEPING)
    }


def gaps(ours: type, theirs: type, allowed: Mapping[str, str]) -> list[str]:
    """The names that are neither ours nor allowed, and the permissions that nobody needs."""
    before = ours.__mro__[: ours.__mro__.index(theirs)]
    missing = surface(theirs) - {name for cls in before for name in vars(cls)}
    return sorted(
        [f"{name}: neither defined nor allowed" for name in missing - allowed.keys()]
        + [f"{name}: allowed, but not inherited" for name in allowed.keys() - missing]
        + [f"{name}: allowed without a reason" for name, why in allowed.items() if not why]
    )


def test_every_attribute_of_torchs_class_is_ours_or_allowed() -> None:
    from closeranks import DistributedDataParallel

    assert gaps(DistributedDataParallel, THEIRS, INHERITED) == []


def test_our_class_is_one_of_torchs() -> None:
    from closeranks import DistributedDataParallel

    assert issubclass(DistributedDataParallel, THEIRS) and DistributedDataParallel is not THEIRS


class _Theirs:
    constant = 1
    nothing_yet = None

    def __init__(self) -> None: ...

    def method(self) -> None: ...

    @property
    def value(self) -> int:
        return 1

    @staticmethod
    def free() -> None: ...


class _Mixin:
    def method(self) -> None: ...


class _Ours(_Mixin, _Theirs):
    constant = 2
    nothing_yet = None

    def __init__(self) -> None: ...


@pytest.mark.parametrize(
    ("allowed", "objections"),
    [
        ({"value": "pure", "free": "pure"}, []),
        ({"value": "pure"}, ["free: neither defined nor allowed"]),
        ({"value": "", "free": "pure"}, ["value: allowed without a reason"]),
        ({"value": "x", "free": "x", "method": "x"}, ["method: allowed, but not inherited"]),
    ],
)
def test_a_gap_is_found(allowed: dict[str, str], objections: list[str]) -> None:
    assert gaps(_Ours, _Theirs, allowed) == objections


def test_an_attribute_that_is_none_is_an_attribute() -> None:
    assert "nothing_yet" in surface(_Theirs)


def test_torchs_class_has_the_surface_that_we_know() -> None:
    """A new name in a later torch shows up here as a decision to be made, not as a surprise."""
    assert {"__init__", "forward", "no_sync", "join", "_active_ddp_module"} <= surface(THEIRS)
    assert "__doc__" not in surface(THEIRS)
