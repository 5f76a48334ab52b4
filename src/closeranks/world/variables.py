"""Environment variables as values: text, whole numbers, and words for an error message.

Knows no variable by name. An empty variable counts as unset, as in torch.
"""

from __future__ import annotations

from collections.abc import Mapping


class Variables:
    """A read-only view of an environment that says clearly what is wrong with it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, *names: str) -> str | None:
        """The first of these variables that is set."""
        for name in names:
            value = self._environ.get(name, "").strip()
            if value:
                return value
        return None

    def number(self, *names: str) -> int | None:
        """The first of these variables that is set, as a whole number of at least 0."""
        for name in names:
            value = self.text(name)
            if value is None:
                continue
            if not (value.isascii() and value.isdigit()):
                raise ValueError(
                    f"{name}={value!r} is not a whole number of at least 0. Nothing was started; "
                    f"correct or unset {name}."
                )
            return int(value)
        return None

    def shown(self, *names: str) -> str:
        """ "RANK=5, WORLD_SIZE unset": for messages."""
        values = [(name, self.text(name)) for name in names]
        return ", ".join(f"{n} unset" if v is None else f"{n}={v}" for n, v in values)
