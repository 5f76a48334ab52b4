"""The set-up: what it says on a machine that lacks something, and when it has nothing to do.

The machine is a folder of tools and a python that only pretends: it tells a version, it can or
cannot make a virtual environment, and the python in that environment writes down what pip was
asked for. No package is fetched.
"""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.tidy.findings import ROOT

KERNELS = [f"src/closeranks/{layer}/kernels.c" for layer in ("segment", "wire")]
TOOLS = ("cat", "chmod", "cksum", "cp", "dirname", "grep", "mkdir", "rm", "sed", "sh")

PYTHON = """#!/bin/sh
case "$*" in
*"print("*) echo {version} ;;
*"version_info < (3, 11)"*) exit {too_old} ;;
*"ensurepip"*) exit {no_venv} ;;
*"import pip"*) ;;
"--version") echo "Python {version}" ;;
"-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python && echo "venv $0" >> "{log}" ;;
*"-m pip install"*) shift 3 && echo "pip $*" >> "{log}" ;;
*) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""


class Machine:
    """A checkout and the commands that can be run in it, and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.log = folder / "bin", folder / "log"
        self.checkout = folder / "checkout"
        self.bin.mkdir()
        for name in (".ci/setup", "pyproject.toml", "constraints.txt", *KERNELS):
            (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.checkout / name)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))

    def add_python(self, name: str, version: str, venv: bool = True) -> None:
        too_old = int(tuple(map(int, version.split("."))) < (3, 11))
        text = PYTHON.format(version=version, too_old=too_old, no_venv=int(not venv), log=self.log)
        self.add(name, text)

    def add(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(stat.S_IRWXU)

    def setup(self, **env: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.bin / "sh"), ".ci/setup"]
        environment = {"PATH": str(self.bin)} | env
        return subprocess.run(
            command, cwd=self.checkout, env=environment, capture_output=True, text=True, timeout=60
        )

    def done(self, **env: str) -> list[str]:
        """Run the set-up, which must succeed, and return what it did."""
        self.log.write_text("")
        result = self.setup(**env)
        assert result.returncode == 0, result.stderr
        return self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_no_python_at_all_names_the_packages(machine: Machine) -> None:
    result = machine.setup()
    assert result.returncode == 1
    assert "found: none." in result.stderr
    assert "Debian packages python3 and python3-venv" in result.stderr


def test_an_old_python_is_named_with_its_version(machine: Machine) -> None:
    machine.add_python("python3", "3.10")
    result = machine.setup()
    assert result.returncode == 1 and "found: python3 is 3.10;" in result.stderr


def test_a_python_without_venv_names_the_package(machine: Machine) -> None:
    machine.add_python("python3", "3.11", venv=False)
    result = machine.setup()
    assert result.returncode == 1
    assert "python3-venv (or python3.11-venv)" in result.stderr
    assert not (machine.checkout / ".venv").exists()


def test_the_first_suitable_python_is_taken(machine: Machine) -> None:
    machine.add_python("python3", "3.10")
    machine.add("python3.13", "#!/bin/sh\necho 'python3.13: not installed' >&2\nexit 127\n")
    machine.add_python("python3.12", "3.12")
    machine.add_python("python3.11", "3.11")
    assert machine.done()[0].endswith("/python3.12")


def test_python_of_the_users_choice_is_the_only_one(machine: Machine) -> None:
    machine.add_python("python3", "3.12")
    machine.add_python("mine", "3.10")
    assert machine.setup(PYTHON="mine").returncode == 1
    machine.add_python("mine", "3.13")
    assert machine.done(PYTHON="mine")[0].endswith("/mine")


def test_everything_is_installed_under_the_constraints(machine: Machine) -> None:
    machine.add_python("python3", "3.11")
    _, first, second = machine.done()
    assert first.endswith(" -c .venv/constraints.txt setuptools torch==2.13.0")
    assert second.endswith(" --no-build-isolation -e .[demo,plot,test,examples,check]")
    assert "-c .venv/constraints.txt" in second


def test_the_second_time_there_is_nothing_to_do_or_to_say(machine: Machine) -> None:
    machine.add_python("python3", "3.11")
    machine.done()
    assert machine.done() == []
    assert machine.setup().stderr == ""


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", *KERNELS])
def test_what_has_changed_is_installed_into_the_same_venv(machine: Machine, name: str) -> None:
    machine.add_python("python3", "3.11")
    machine.done()
    with (machine.checkout / name).open("a") as file:
        file.write("# changed\n")
    assert [line.split()[0] for line in machine.done()] == ["pip", "pip"]


def test_an_installation_that_failed_is_done_again(machine: Machine) -> None:
    machine.add_python("python3", "3.11")
    machine.done()
    (machine.checkout / ".venv" / "ready").unlink()
    assert [line.split()[0] for line in machine.done()] == ["pip", "pip"]


def test_another_torch_makes_a_new_venv_without_the_pin_and_is_remembered(machine: Machine) -> None:
    machine.add_python("python3", "3.11")
    machine.done()
    venv, first, _ = machine.done(TORCH_SPEC="./torch.whl")
    assert venv.startswith("venv ") and first.endswith(" setuptools ./torch.whl")
    assert "torch==" not in (machine.checkout / ".venv" / "constraints.txt").read_text()
    assert machine.done() == []
    assert len(machine.done(TORCH_SPEC="torch==2.14")) == 3


def test_a_checkout_that_was_moved_gets_a_new_venv(machine: Machine) -> None:
    machine.add_python("python3", "3.11")
    machine.done()
    machine.checkout = machine.checkout.rename(machine.checkout.with_name("elsewhere"))
    assert len(machine.done()) == 3


def test_a_venv_of_the_users_own_is_left_alone(machine: Machine) -> None:
    machine.add_python("python3", "3.11")
    (machine.checkout / ".venv").mkdir()
    (machine.checkout / ".venv" / "mine").touch()
    result = machine.setup()
    assert result.returncode == 1 and "did not make it" in result.stderr
    assert os.listdir(machine.checkout / ".venv") == ["mine"]
