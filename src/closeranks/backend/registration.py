"""Tells torch.distributed of the backend "closeranks", whoever is imported first.

    torch first        it is there already: register now
    closeranks first   a finder stands in front of the import system until torch.distributed's
                       own module has been loaded, registers then, and goes

So importing closeranks never imports torch. The group itself is loaded when the first is made.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "closeranks"
_WHERE = "torch.distributed.distributed_c10d"


def arrange() -> None:
    """Register now or as soon as that can be done."""
    module = sys.modules.get(_WHERE)
    if module is not None and hasattr(module, "Backend"):
        register(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def register(module: ModuleType) -> None:
    """Make `init_process_group("closeranks")` known to torch.distributed's module."""
    backend: Any = module.Backend
    if NAME not in backend.backend_list:
        backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> Any:
    return importlib.import_module("closeranks.backend.group").create(options)


class _Finder(MetaPathFinder):
    """Finds nothing itself: it lets the others find one module, and stays to see it loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _WHERE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Another loader, and then registration."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None, "a module is executed by its specification"
        # Nobody is to see that we stood in between.
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        register(module)
