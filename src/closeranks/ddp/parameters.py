"""Which parameters of a module are averaged, and whether the module still holds them.

Knows modules and names; must not know buckets.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor, nn

from closeranks.reducer.options import Candidate


def candidates(module: nn.Module, ignored: set[str]) -> list[Candidate]:
    """Every parameter that is ours, frozen ones included, once, in order of registration."""
    found: dict[Tensor, Candidate] = {}
    for module_name, part in module.named_modules():
        sparse = isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
        for own_name, parameter in part.named_parameters(recurse=False):
            name = f"{module_name}.{own_name}" if module_name else own_name
            if name not in ignored and parameter not in found:
                found[parameter] = Candidate(name, parameter, sparse, parameter.dtype)
    return list(found.values())


def replacement_check(module: nn.Module, known: list[Candidate]) -> Callable[[int], bool]:
    """Tells by number whether the module no longer holds a parameter."""
    reference = weakref.ref(module)

    def is_replaced(number: int) -> bool:
        holder = reference()
        parameter = known[number].parameter
        return holder is not None and all(parameter is not p for p in holder.parameters())

    return is_replaced
