"""`closeranks demo --kill` refuses what would show nothing; tests/chaos looks at it whole."""

from __future__ import annotations

import pytest

from closeranks.cli import main


@pytest.mark.parametrize("wrong", [["-n", "1"], ["--quick"]])
def test_what_would_show_nothing_is_refused(
    wrong: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--kill", *wrong]) == 2
    assert "nothing" in capfd.readouterr().err.lower()
