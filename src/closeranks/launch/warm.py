"""What the process that workers are forked from imports first: a guess from the text of the script.

A wrong guess costs a second, at the start or at each restart, and nothing else.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from closeranks.launch.options import RunOptions

_ALWAYS = ("torch", "torch.distributed")
# Optimizers import torch._dynamo at their first step; a newcomer has no second for that.
_FOR_WORDS = (
    ((b"closeranks", b"DistributedDataParallel"), ("closeranks.ddp.wrapper",)),
    ((b"closeranks", b"Ranks("), ("closeranks.lanes.ranks", "torch._dynamo")),
)


def modules_for(options: RunOptions) -> list[str]:
    modules = list(_ALWAYS)
    source = _source(options)
    if source is not None:
        text = source.read_bytes()
        for words, wanted in _FOR_WORDS:
            if all(word in text for word in words):
                modules += wanted
    return [*modules, *options.preload]


def _source(options: RunOptions) -> Path | None:
    """The file that will run, found without importing a package above it."""
    if options.is_program:
        return None
    if not options.is_module:
        return Path(options.target)
    top, *rest = options.target.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin)
    if rest:
        path = path.parent.joinpath(*rest).with_suffix(".py")
    return path if path.suffix == ".py" and path.is_file() else None
