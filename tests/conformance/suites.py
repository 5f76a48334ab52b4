"""Which test classes inside torch are run, and which of their tests concern DDP.

torch's files test all of torch.distributed. A test concerns DDP if its code, through the
functions and classes of the same file that it names, reaches DistributedDataParallel; this is
read from the source, so that new tests of a new torch are found without a list. This module
knows nothing of how tests are run, and imports no torch.
"""

from __future__ import annotations

import ast
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Suite:
    name: str
    cases: str  # the module here that defines the test classes
    classes: tuple[str, ...]
    all_concern_ddp: bool  # if not, they are selected by their source
    for_devices: bool  # most of its tests want GPUs, so that --force-cpu changes them


SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            name="distributed_test",
            cases="tests.conformance.cases_distributed",
            classes=("DistributedTest",),
            all_concern_ddp=False,
            for_devices=True,
        ),
        Suite(
            name="ddp_under_dist_autograd_test",
            cases="tests.conformance.cases_autograd",
            classes=("DdpUnderDistAutogradTest", "DdpComparisonTest"),
            all_concern_ddp=True,
            for_devices=False,
        ),
    )
}

_COMPILING = ("DistributedTest.test_ddp_compile_static_graph",)
_COMPILERS = ("g++", "c++", "clang++")
_PYTHON_H = Path(sysconfig.get_paths()["include"], "Python.h")


def cannot_run(test: str) -> str:
    """What this machine lacks for the test, or an empty string."""
    if test not in _COMPILING:
        return ""
    if not any(map(shutil.which, _COMPILERS)):
        return "torch.compile needs a C++ compiler (Debian package g++)"
    return "" if _PYTHON_H.exists() else "torch.compile needs Python.h (Debian package python3-dev)"


# These count the collectives of the process group in a profile, so the gradients must take it.
_PROFILING = (
    "DistributedTest.test_ddp_profiling_autograd_profiler",
    "DistributedTest.test_ddp_profiling_torch_profiler",
)


def environment_of(test: str) -> dict[str, str]:
    """What a test needs in the environment of its ranks."""
    return {"CLOSERANKS_EXCHANGE": "group"} if test in _PROFILING else {}


_DDP_NAMES = {"DistributedDataParallel", "DDP"}
_CONTAINERS = {"DistributedTest", "_DistTestBase"}  # they name everything


def concerning_ddp(source: str, tests: list[str]) -> list[str]:
    """Those of `tests`, methods of a class in `source`, whose code reaches DDP."""
    names_in = _names_by_definition(source)
    return [test for test in tests if _reaches_ddp(_definition_of(test, names_in), names_in)]


def _names_by_definition(source: str) -> dict[str, set[str]]:
    names_in: dict[str, set[str]] = {}
    for definition in ast.walk(ast.parse(source)):
        if isinstance(definition, (ast.FunctionDef, ast.ClassDef)):
            names = names_in.setdefault(definition.name, set())
            for node in ast.walk(definition):
                if isinstance(node, ast.Name):
                    names.add(node.id)
                elif isinstance(node, ast.Attribute):
                    names.add(node.attr)
    return names_in


def _definition_of(test: str, names_in: dict[str, set[str]]) -> str:
    """The method a test was made from: parametrised ones have something appended to the name."""
    if test in names_in:
        return test
    prefixes = [name for name in names_in if name.startswith("test_") and test.startswith(name)]
    return max(prefixes, key=len, default=test)


def _reaches_ddp(start: str, names_in: dict[str, set[str]]) -> bool:
    seen, to_visit = {start}, [start]
    while to_visit:
        for name in names_in.get(to_visit.pop(), set()):
            if name in _DDP_NAMES:
                return True
            helper = name in names_in and not name.startswith("test_") and name not in _CONTAINERS
            if helper and name not in seen:
                seen.add(name)
                to_visit.append(name)
    return False
