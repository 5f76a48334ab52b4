"""Chaos tests take minutes: they run only when their folder or file is asked for by name."""

from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    started_in = config.invocation_params.dir
    asked_for = [(started_in / argument.split("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(_HERE) for path in asked_for) else True
