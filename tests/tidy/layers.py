"""The law of layers: who may import whom, downwards only, and how docs/architecture.md shows it.

The ground (world, errors, observe) may be imported by everybody. The door, closeranks/__init__.py,
may import everything and is imported by nobody: a module takes a name from where it is defined.
"""

from collections.abc import Mapping

GROUND = frozenset({"errors", "observe", "world"})

# From the top down: a layer knows the next one, and only the wrapper that the
# user holds may reach for everything below it.
LAW: dict[str, frozenset[str]] = {
    "__main__": frozenset({"cli"}),
    "cli": frozenset({"bench", "doctor", "launch", "observe"}),
    "doctor": frozenset({"launch"}),
    "measure": frozenset({"bench", "ddp", "exchange", "segment"}),
    "bench": frozenset({"launch"}),
    "launch": frozenset({"segment"}),
    "demo": frozenset({"ddp", "lanes"}),
    "lanes": frozenset({"checkpoint", "exchange", "reducer", "segment"}),
    "backend": frozenset({"exchange"}),
    "ddp": frozenset({"exchange", "reducer", "segment", "wire"}),
    "reducer": frozenset({"exchange"}),
    "exchange": frozenset({"segment", "wire"}),
    "checkpoint": frozenset(),
    "segment": frozenset(),
    "wire": frozenset(),
    "observe": frozenset({"errors", "world"}),
    "world": frozenset({"errors"}),
    "errors": frozenset(),
}

TORCH_FREE = frozenset({"", "__main__", "bench", "cli", "doctor", "errors", "launch", "observe"})
RESERVED = "(reserved)"


def breaches(graph: Mapping[str, set[str]]) -> list[str]:
    """What the imports of today do that the law does not allow."""
    found = []
    for layer, imported in sorted(graph.items()):
        if layer == "":
            continue
        if layer not in LAW:
            found.append(f"{layer}: no such layer; give it a place in tests/tidy/layers.py")
            continue
        ground = frozenset() if layer in GROUND else GROUND
        for other in sorted(imported - LAW[layer] - ground):
            found.append(f"{layer} imports {other or 'the door'}: the law does not allow it")
    return found


def picture(graph: Mapping[str, set[str]]) -> str:
    """The block of docs/architecture.md: every layer, what it may import, what it does import."""
    rows = [("layer", "may import", "imports today")]
    for layer, allowed in LAW.items():
        today = " ".join(sorted(graph[layer])) or "-" if layer in graph else RESERVED
        rows.append((layer, " ".join(sorted(allowed)) or "-", today))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in rows)
