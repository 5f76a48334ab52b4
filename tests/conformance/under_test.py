"""Puts the class under test where torch's DistributedDataParallel stands, in this process.

The modules with test classes call `install` before they import torch's. In ranks started with
`spawn` that happens again by itself, because unpickling the test class imports its module.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import torch.distributed as dist
import torch.nn.parallel.distributed

from tests.conformance import broken, notes, pretend, processes
from tests.conformance.settings import Settings

_TORCHS_OWN = torch.nn.parallel.distributed.DistributedDataParallel


@functools.cache  # a process that imports several test modules installs once
def install() -> Settings:
    """Do all that Settings asks for within one process, and return them."""
    settings = Settings.from_environment()
    candidate = load(settings.ddp) if settings.ddp else _TORCHS_OWN
    if settings.broken:
        candidate = broken.BROKEN[settings.broken](candidate)
    if settings.force_cpu:
        pretend.install()
    if settings.backend:
        _put_in_place_of_gloo(settings.backend)
    _watch_constructor(candidate, settings)
    if candidate is not _TORCHS_OWN:
        _put_in_place_of_torchs(candidate)
    processes.install(settings)
    return settings


def _put_in_place_of_gloo(name: str) -> None:
    """Default groups of gloo are of another backend, and with them the groups that follow them."""
    importlib.import_module("closeranks")  # which tells torch of its own
    start = dist.init_process_group

    @functools.wraps(start)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        start(name if backend == "gloo" else backend, *args, **kwargs)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group


def load(spec: str) -> Any:
    """The object that "module:Name" or "module:Outer.Name" means."""
    module, _, path = spec.partition(":")
    if not module or not path:
        raise ValueError(
            f"{spec!r}: expected module:Class, as in closeranks:DistributedDataParallel"
        )
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


def _watch_constructor(candidate: Any, settings: Settings) -> None:
    """Note every construction, and leave out devices that only seem to be there."""
    construct = candidate.__init__

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        notes.add(settings, notes.CONSTRUCTED)
        if settings.force_cpu:  # (module, device_ids, output_device, ...)
            args = (*args[:1], *(None for _ in args[1:3]), *args[3:])
            kwargs.pop("device_ids", None)
            kwargs.pop("output_device", None)
        construct(self, *args, **kwargs)

    candidate.__init__ = __init__


def _put_in_place_of_torchs(candidate: Any) -> None:
    """Every module imported so far, but those of the candidate, sees it under torch's name."""
    parents = getattr(candidate, "__mro__", (candidate,))
    own_packages = {parent.__module__.split(".")[0] for parent in parents} - {"torch"}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in own_packages:
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is _TORCHS_OWN:
                setattr(module, attribute, candidate)
