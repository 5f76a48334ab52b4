"""What a training has become: everything prepared, as a tree that can be kept, given and loaded.

A module gives its state_dict, the buffers that are not in it, and which parameters are frozen. An
optimizer may hold parameters of no module; they are state as well. Everything else is what its
state_dict says. Loading overwrites all of it in place.

Knows objects with state_dict; must not know workers, memory or files.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from closeranks.checkpoint.format import digest, encode
from closeranks.errors import CheckpointMismatch
from closeranks.lanes import optimizer_state


class Prepared:
    """The objects that were prepared, in the order in which they were given."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.state: dict[str, Any] = {}  # of the user's own

    def add(self, thing: Any) -> None:
        """Take one more object, or raise TypeError if its state cannot be kept."""
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise TypeError(
                f"prepare() was given a {type(thing).__name__}; wanted a module, an optimizer, a "
                "scheduler or anything else with state_dict() and load_state_dict(). Nothing was "
                "prepared."
            )
        if any(known is thing for known in self.objects):
            return
        name = f"{len(self.objects)}:{type(thing).__name__}"
        for parameter in _parameters_of(thing):
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise TypeError(
                    f"{name} has parameters without a shape. Nothing was prepared; run the module "
                    "once on a batch before prepare()."
                )
        if isinstance(thing, Optimizer):
            optimizer_state.create(thing)
        encode(_capture(thing), where=f"the state of {name}")
        self.objects.append(thing)

    @property
    def modules(self) -> list[nn.Module]:
        return [thing for thing in self.objects if isinstance(thing, nn.Module)]

    def parameters(self) -> list[Tensor]:
        """All parameters that get gradients, each once."""
        return [p for p, _ in self._trained()]

    def parameter_names(self) -> list[str]:
        """What parameters() are called, in its order."""
        return [name for _, name in self._trained()]

    def _trained(self) -> list[tuple[Tensor, str]]:
        found: dict[int, tuple[Tensor, str]] = {}
        for name, thing in self._named():
            if isinstance(thing, AveragedModel):
                continue  # Its parameters follow those of another.
            named = thing.named_parameters() if isinstance(thing, nn.Module) else ()
            for inner, parameter in named:
                found.setdefault(id(parameter), (parameter, f"{name}.{inner}"))
            for number, tensor in enumerate(_parameters_of(thing)):
                found.setdefault(id(tensor), (tensor, f"{name} parameter {number}"))
        return [(p, name) for p, name in found.values() if p.requires_grad]

    def capture(self) -> dict[str, Any]:
        """Everything, as a tree whose tensors are not copied."""
        tree = self.trees()
        stray = [p.detach() for p in self._stray()]
        gradients = [None if p.grad is None else p.grad.detach() for p in self.parameters()]
        return {"objects": tree, "stray": stray, "gradients": gradients, "state": self.state}

    def files(self, tree: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
        """The weights of each module in a captured tree, by a name that a file can have."""
        found = {}
        for name, thing in self._named():
            if isinstance(thing, nn.Module):
                values = tree["objects"][name]["values"]
                tensors = {key: v for key, v in values.items() if isinstance(v, Tensor)}
                found[re.sub(r"\W", "-", name)] = tensors
        return found

    def differs_from(self, tree: dict[str, Any]) -> str:
        """How what is prepared is another thing than a tree is of; or nothing."""
        names, theirs = [name for name, _ in self._named()], list(tree["objects"])
        if names != theirs:
            return (
                f"prepared are {', '.join(names) or 'no objects'}, but the state that was found is "
                f"of {', '.join(theirs) or 'no objects'}"
            )
        for name, thing in self._named():
            if isinstance(thing, nn.Module):
                mine, found = _looks(thing.state_dict()), _looks(tree["objects"][name]["values"])
                for key in [*mine, *found]:
                    if mine.get(key) != found.get(key):
                        return (
                            f"{key} of {name} is {mine.get(key, 'not there')}, but in the state "
                            f"that was found it is {found.get(key, 'not there')}"
                        )
        return ""

    def restore(self, tree: dict[str, Any]) -> None:
        """Overwrite everything with a tree whose tensors are nobody else's."""
        for name, thing in self._named():
            _restore(thing, tree["objects"][name])
        with torch.no_grad():
            for parameter, value in zip(self._stray(), tree["stray"], strict=True):
                parameter.copy_(value)
        for parameter, gradient in zip(self.parameters(), tree["gradients"], strict=True):
            # Not zero where a script adds up gradients over several steps.
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        self.state.clear()
        self.state.update(tree["state"])

    def restore_known(self, tree: dict[str, Any], where: str) -> None:
        """Overwrite what is prepared, which may be less than the tree is of."""
        left = dict(tree["objects"])
        pairs = []
        for name, thing in self._named():
            kind = name.partition(":")[2]
            key = next((k for k in left if k.partition(":")[2] == kind), None)
            if key is None:
                raise CheckpointMismatch(
                    f"{name} was prepared, but {where} is of {', '.join(tree['objects'])}. Nothing "
                    "was loaded; prepare some of these, in this order."
                )
            pairs.append((thing, left.pop(key)))
        for thing, of_thing in pairs:
            _restore(thing, of_thing)
        self.state.clear()
        self.state.update(tree["state"])

    def trees(self) -> dict[str, Any]:
        """The state of every object, by its name."""
        return {name: _capture(thing) for name, thing in self._named()}

    def digest(self) -> str:
        """sha256 over everything prepared."""
        return digest(self.trees())

    def _named(self) -> list[tuple[str, Any]]:
        return [(f"{i}:{type(thing).__name__}", thing) for i, thing in enumerate(self.objects)]

    def _stray(self) -> list[Tensor]:
        """Parameters of optimizers that belong to no module."""
        known = {id(p) for module in self.modules for p in module.parameters()}
        found = {id(p): p for thing in self.objects for p in _parameters_of(thing)}
        return [p for key, p in found.items() if key not in known]


def _parameters_of(thing: Any) -> list[Tensor]:
    if isinstance(thing, nn.Module):
        return list(thing.parameters())
    if isinstance(thing, Optimizer):
        return [p for group in thing.param_groups for p in group["params"]]
    return []


def _looks(values: dict[str, Any]) -> dict[str, str]:
    """Of each value of a module what must not change."""
    return {
        key: f"{tuple(v.shape)} of {v.dtype}" if isinstance(v, Tensor) else type(v).__name__
        for key, v in values.items()
    }


def _capture(thing: Any) -> Any:
    if not isinstance(thing, nn.Module):
        return thing.state_dict()
    values = dict(thing.state_dict())
    others = {name: b for name, b in thing.named_buffers() if name not in values}
    trained = [p.requires_grad for p in thing.parameters()]
    return {"values": values, "buffers": others, "trained": trained}


def _restore(thing: Any, tree: Any) -> None:
    if not isinstance(thing, nn.Module):
        thing.load_state_dict(tree)
        return
    thing.load_state_dict(tree["values"])
    with torch.no_grad():
        for name, buffer in thing.named_buffers():
            if name in tree["buffers"]:
                buffer.copy_(tree["buffers"][name])
    for parameter, trained in zip(thing.parameters(), tree["trained"], strict=True):
        parameter.requires_grad_(trained)
