"""Keeps torch.compile out of what is written in Python here and in C++ in torch's own groups.

A compiled function calls a group's methods by way of C++, and the compiler sees each as a new
function to compile, which it cannot. torch.compiler.disable would import the compiler, which takes
longer than everything else here; this says the same to the part of it that is always there.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo import eval_frame

T = TypeVar("T", bound=type)


def untraced(kind: T) -> T:
    """Have the methods of a class, and all that they call, run as they are; a decorator."""
    skip = eval_frame._FrameAction.SKIP
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            eval_frame.set_code_exec_strategy(
                method.__code__, eval_frame._FrameExecStrategy(skip, skip)
            )
    return kind
