"""What is installed is decided in two files, and they agree."""

import re
import tomllib

from tests.tidy.findings import ROOT

RUNTIME = {"numpy", "psutil", "rich", "safetensors", "torch"}


def _normal(requirement: str) -> str:
    """The name of a requirement, as package indexes compare names."""
    name = re.match(r"[\w.-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def _pins() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_the_package_needs_five_others_and_no_more() -> None:
    assert {_normal(each) for each in _project()["project"]["dependencies"]} == RUNTIME


def test_every_line_of_the_constraints_is_one_exact_version() -> None:
    odd = [line for line in _pins() if not re.fullmatch(r"[\w.-]+==[\d.]+", line)]
    assert odd == []
    names = [_normal(line) for line in _pins()]
    assert len(names) == len(set(names))


def test_everything_that_is_asked_for_is_pinned() -> None:
    project = _project()
    asked = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        asked += extra
    assert {_normal(each) for each in asked} <= {_normal(line) for line in _pins()}


def test_the_torch_that_is_pinned_is_one_that_is_allowed() -> None:
    """The lowest version that is promised is the one that everything was run with."""
    (pin,) = [line for line in _pins() if line.startswith("torch==")]
    assert "torch>=2.13" in _project()["project"]["dependencies"]
    assert pin == "torch==2.13.0"
