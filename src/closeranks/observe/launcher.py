"""How this process tells its launcher something, if `closeranks run` has started it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Set in a worker of our launcher: hands it a message.
tell: Callable[[dict[str, Any]], object] | None = None
