"""What a wire format keeps from step to step, as a dictionary that can be saved and loaded.

Besides the format's own state this is the order of the gradients in their buckets: formats encode
neighbours together, so a resumed run that gathers gradients differently would end with other bits.
Knows the reducer; must not know formats.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from closeranks.reducer.reducer import Reducer

logger = logging.getLogger("closeranks")

_VERSION = 1
_FRESH = "Leave load_wire_state_dict() out to begin with nothing unsent."


def save(reducer: Reducer, wire: str) -> dict[str, Any]:
    """The state of this rank: tensors, numbers and names only."""
    fleet, kept = reducer.fleet, reducer.exchange.wire_state
    return {
        "version": _VERSION,
        "wire": wire,
        "rank": reducer.exchange.rank,
        "size": reducer.exchange.size,
        "exchanges": reducer.waiter.exchange_number,
        "order": fleet.names(fleet.order) if reducer.has_rebuilt_buckets else None,
        "last": fleet.names(sorted(fleet.wait_for_end)),
        "kept": None if kept is None else kept.state(),
    }


def load(state: Mapping[str, Any], reducer: Reducer, wire: str) -> None:
    """Refuse what is not this rank's state; raise on all ranks if it is not of one moment."""
    exchange = reducer.exchange
    problem = _problem(state, reducer, wire)
    number = -1 if problem else int(state["exchanges"])
    moment = torch.tensor([number, -number], dtype=torch.int32, device=reducer.device)
    reducer.waiter.wait(exchange.all_max(moment), lambda: "the comparison of wire states")
    if problem:
        raise ValueError(f"load_wire_state_dict: {problem}. Nothing was loaded on any rank.")
    latest, earliest = moment[0].item(), -moment[1].item()
    if latest != earliest:
        raise ValueError(
            "load_wire_state_dict: the ranks have states of different moments (exchange "
            f"{latest} here or elsewhere; another rank has {earliest}, or none that fits it). "
            f"Nothing was loaded on any rank. Load states that were saved together. {_FRESH}"
        )
    numbers = {c.name: n for n, c in enumerate(reducer.candidates)}
    if state["order"] is not None:
        reducer.fleet.wait_for_end = {numbers[name] for name in state["last"]}
        order = [numbers[name] for name in state["order"]]
        reducer.adopt(order, order)
        reducer.has_rebuilt_buckets = True
    kept = exchange.wire_state
    if kept is not None and state["kept"] is not None:
        kept.load_state(state["kept"])
    elif state["kept"] is not None and exchange.rank == 0:
        logger.warning(
            "load_wire_state_dict: gradients pass through no network here (%s), so what %s had "
            "not sent is dropped.",
            exchange.way,
            wire,
        )


def _problem(state: Mapping[str, Any], reducer: Reducer, wire: str) -> str:
    """Why a state is not this rank's, or nothing."""
    if state.get("version") != _VERSION:
        return f"version {state.get('version')!r}, wanted {_VERSION}: it is no wire state of ours"
    exchange = reducer.exchange
    here = {"wire": wire, "rank": exchange.rank, "size": exchange.size}
    for key, value in here.items():
        if state[key] != value:
            return (
                f"the state was saved with {key}={state[key]!r}, and here is {key}={value!r}. "
                f"Load on every rank what that rank saved, in a job of as many ranks. {_FRESH}"
            )
    known = {c.name for c in reducer.candidates}
    missing = [name for name in [*(state["order"] or []), *state["last"]] if name not in known]
    if missing:
        return f"it knows a parameter {missing[0]!r} that this module does not have. {_FRESH}"
    return ""
