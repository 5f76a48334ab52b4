"""Imports go downwards only, never in a circle, and the picture in the documentation is true."""

import re
import subprocess
import sys
import textwrap

import pytest

from tests.tidy.findings import ROOT, package_sources
from tests.tidy.imports import Import, cycles, foreign, imports, layer_graph, layer_of, module_of
from tests.tidy.layers import GROUND, LAW, TORCH_FREE, breaches, picture


def test_imports_go_downwards_only() -> None:
    assert breaches(layer_graph(package_sources())) == []


def test_no_modules_import_one_another_in_a_circle() -> None:
    assert cycles(package_sources()) == []


def test_the_law_itself_has_no_circle() -> None:
    """Each layer may import only what stands below it in the table."""
    order = list(LAW)
    for layer, allowed in LAW.items():
        assert all(order.index(layer) < order.index(other) for other in allowed), layer


def test_the_picture_in_the_documentation_is_true() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    block = re.search(r"```text\n(layer .*?)\n```", text, re.DOTALL)
    assert block, "docs/architecture.md has no block of layers"
    wanted = picture(layer_graph(package_sources()))
    assert block[1] == wanted, f"put this into docs/architecture.md:\n{wanted}"


def test_what_the_launcher_needs_imports_no_torch() -> None:
    for path, text in package_sources().items():
        if layer_of(module_of(path)) in TORCH_FREE:
            at_import = {i.target.split(".")[0] for i in imports(path, text) if i.at_import}
            everywhere = foreign(path, text)
            # The door names torch for the type checker, through the modules that it loads late.
            assert "torch" not in (at_import if path == "__init__.py" else everywhere), path


def test_importing_what_the_launcher_needs_loads_no_torch() -> None:
    """World belongs to it: a launcher hands it to the workers."""
    modules = [module_of(p) for p in package_sources() if layer_of(module_of(p)) in TORCH_FREE]
    names = [f"closeranks.{module}".rstrip(".") for module in [*modules, "world"]]
    program = f"import sys, {', '.join(names)}\nsys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "torch was loaded"


# Below: the checkers themselves, each seen to object.


def test_imports_are_found_wherever_they_stand() -> None:
    text = textwrap.dedent("""
        import torch.nn
        from . import plan
        from ..exchange.tree import fold
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from closeranks.world import World
        try:
            import rich
        except ImportError:
            rich = None
        class A:
            import psutil
            def f(self):
                import numpy
    """)
    assert imports("reducer/bucket.py", text) == [
        Import("torch.nn", True),
        Import("closeranks.reducer.plan", True),
        Import("closeranks.exchange.tree.fold", True),
        Import("typing.TYPE_CHECKING", True),
        Import("closeranks.world.World", False),
        Import("rich", True),
        Import("psutil", True),
        Import("numpy", False),
    ]
    assert foreign("reducer/bucket.py", text) == {"torch", "typing", "rich", "psutil", "numpy"}


def test_a_relative_import_in_an_init_is_relative_to_its_package() -> None:
    assert imports("ddp/__init__.py", "from .wrapper import X") == [
        Import("closeranks.ddp.wrapper.X", True)
    ]
    assert imports("world.py", "from .errors import X") == [Import("closeranks.errors.X", True)]


@pytest.mark.parametrize(
    ("path", "text", "objection"),
    [
        ("reducer/plan.py", "from closeranks.ddp.options import X", "reducer imports ddp"),
        ("reducer/plan.py", "def f():\n    from ..ddp import X", "reducer imports ddp"),
        ("wire/cast.py", "import closeranks.segment.words", "wire imports segment"),
        ("errors.py", "from closeranks import world", "errors imports world"),
        ("world.py", "from closeranks import DistributedDataParallel", "world imports the door"),
        ("tools.py", "", "tools: no such layer"),
    ],
)
def test_an_import_upwards_is_objected_to(path: str, text: str, objection: str) -> None:
    others = ["__init__.py", "world.py", "ddp/__init__.py", "ddp/options.py", "segment/words.py"]
    found = breaches(layer_graph(dict.fromkeys(others, "") | {path: text}))
    assert len(found) == 1 and found[0].startswith(objection)


def test_the_ground_is_open_to_all_and_the_wrapper_reaches_down() -> None:
    text = "\n".join(f"import closeranks.{name}" for name in [*GROUND, "exchange", "reducer"])
    sources = dict.fromkeys(["exchange/a.py", "reducer/a.py", *(f"{g}.py" for g in GROUND)], "")
    assert breaches(layer_graph(sources | {"ddp/wrapper.py": text})) == []


def test_a_circle_is_objected_to() -> None:
    a, b = "import closeranks.b", "from closeranks.a import X"
    assert cycles({"a.py": a, "b.py": b}) == [["a", "b"]]
    assert cycles({"a.py": a, "b.py": f"def f():\n    {b}"}) == []
    assert cycles({"a.py": a, "b.py": f"if TYPE_CHECKING:\n    {b}"}) == []


def test_a_package_that_gathers_its_modules_is_no_circle() -> None:
    init, wrapper = "from closeranks.ddp.wrapper import X", "from closeranks.ddp.options import Y"
    sources = {"ddp/__init__.py": init, "ddp/wrapper.py": wrapper, "ddp/options.py": ""}
    assert cycles(sources) == []
    assert cycles(sources | {"ddp/options.py": "from closeranks.ddp import X"}) == [
        ["ddp", "ddp.options", "ddp.wrapper"]
    ]


def test_the_picture_says_what_is_reserved() -> None:
    lines = picture({"world": {"errors"}, "errors": set()}).splitlines()
    assert lines[0].split("  ")[0].strip() == "layer"
    assert "reducer     exchange                             (reserved)" in lines
    assert lines[-2].endswith("  errors") and lines[-1].endswith("-")
