"""Judges, once per world size, all cases of the tests that this session selected."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parity.runs import judge

Problems = Callable[[int, str], list[str]]


@pytest.fixture(scope="session")
def problems(request: pytest.FixtureRequest) -> Problems:
    """The problems of a case with so many ranks; the first question of a size runs them all."""
    selected: dict[int, list[str]] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and "problems" in item.fixturenames:
            parameters = item.callspec.params
            selected.setdefault(parameters["size"], []).append(parameters["name"])
    known: dict[int, dict[str, list[str]]] = {}

    def ask(size: int, name: str) -> list[str]:
        if size not in known:
            known[size] = judge(size, selected[size])
        return known[size][name]

    return ask
