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

# name -> why torch's own may run on our object.
INHERITED: dict[str, str] = {
    "_active_ddp_module": "torch.compile reads it on torch's own class, so it is set there",
    "_get_active_ddp_module": "a classmethod that reads _active_ddp_module and nothing else",
    "_get_data_parallel_params": "a static function of a module that knows no wrapper",
    "_set_params_and_buffers_to_ignore_for_model": "a static function that marks the user's module",
    "gather": "a function of its arguments and dim, which our constructor sets",
    "scatter": "a function of its arguments and attributes that our constructor sets",
    "to_kwargs": "a function of its arguments and attributes that our constructor sets",
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
