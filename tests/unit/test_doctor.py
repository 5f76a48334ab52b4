"""What the doctor says of facts: pure."""

from dataclasses import replace
from typing import Any

import pytest

from closeranks.doctor.checks import ERROR, OK, WARNING, Verdict, check
from closeranks.doctor.facts import Facts, Space
from closeranks.doctor.report import lines
from closeranks.launch.machine import Cores, Memory

GB = 10**9
TORCH = {
    "version": "2.13.0+cpu",
    "cuda_built": None,
    "cuda_devices": 0,
    "backends": {"gloo": True, "nccl": False, "mpi": False},
    "kernels": ["c", "python"],
    "unable_to_share": "",
    "threads": 1,
}
HEALTHY = Facts(
    python=(3, 11),
    architecture="x86_64",
    cores=Cores((0, 1, 2, 3), None),
    cores_of_machine=4,
    gpus=0,
    memory=Memory(2 * GB, 16 * GB),
    shm=Space(8 * GB, 8 * GB),
    limits={"nofile": 1024, "memlock": 8 << 20, "nproc": None},
    pids_max=None,
    interfaces={"lo": (True, ["127.0.0.1"]), "eth0": (True, ["192.0.2.2"])},
    environ={},
    torch=TORCH,
)
DOWN = {"lo": (False, ["127.0.0.1"])}
GPUS = {"gpus": 2, "torch": TORCH | {"cuda_devices": 2}}

# What is changed, whose verdict changes, to what, and a word of the remedy.
CASES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"python": (3, 10)}, "python", ERROR, "3.11"),
    ({"cores": Cores((0, 1, 2, 3), 1.5)}, "cores", WARNING, "--cpus"),
    ({"cores_of_machine": 8}, "affinity", WARNING, "taskset"),
    ({"environ": {"OMP_NUM_THREADS": "4"}}, "threads", WARNING, "unset"),
    ({"memory": Memory(15 * GB, 16 * GB)}, "memory", WARNING, "fewer workers"),
    ({"memory": Memory(16 * GB, 16 * GB)}, "memory", ERROR, "fewer workers"),
    ({"shm": None}, "/dev/shm", WARNING, "tmpfs"),
    ({"shm": Space(64 * 10**6, 64 * 10**6)}, "/dev/shm", WARNING, "--shm-size"),
    ({"torch": {"error": "No module named 'torch'"}}, "torch", ERROR, "pip install"),
    ({"torch": TORCH | {"version": "2.9.1"}}, "torch", ERROR, "--upgrade"),
    ({"torch": TORCH | {"backends": {"gloo": False}}}, "backends", ERROR, "gloo"),
    ({"torch": TORCH | {"kernels": ["python"]}}, "C kernels", WARNING, "C compiler"),
    ({"torch": TORCH | {"unable_to_share": "x"}}, "shared memory", WARNING, "Linux"),
    ({"gpus": 2}, "GPUs", ERROR, "CUDA"),
    (GPUS, "GPUs", ERROR, "NCCL"),
    (GPUS, "memlock", WARNING, "ulimit -l"),
    ({"interfaces": DOWN}, "interfaces", ERROR, "ip link"),
    ({"environ": {"GLOO_SOCKET_IFNAME": "ib0"}}, "interfaces", ERROR, "unset"),
    ({"limits": HEALTHY.limits | {"nofile": 100}}, "nofile", WARNING, "ulimit -n"),
    ({"limits": HEALTHY.limits | {"nofile": 20}}, "nofile", ERROR, "ulimit -n"),
    ({"limits": HEALTHY.limits | {"nproc": 60}}, "nproc", WARNING, "ulimit -u"),
    ({"pids_max": 100}, "control group", WARNING, "--pids-limit"),
]


def _by_name(facts: Facts) -> dict[str, Verdict]:
    return {verdict.name: verdict for verdict in check(facts)}


def test_a_healthy_machine_has_nothing_wrong() -> None:
    verdicts = check(HEALTHY)
    assert {verdict.level for verdict in verdicts} == {OK}
    assert not any(verdict.remedy for verdict in verdicts)
    assert lines(verdicts, is_coloured=False)[-1] == "Nothing is wrong."


@pytest.mark.parametrize(("change", "name", "level", "remedy"), CASES)
def test_what_is_wrong_is_told_with_its_remedy(
    change: dict[str, Any], name: str, level: str, remedy: str
) -> None:
    verdict = _by_name(replace(HEALTHY, **change))[name]
    assert verdict.level == level and remedy in verdict.remedy, verdict


def test_nothing_else_is_blamed() -> None:
    verdicts = _by_name(replace(HEALTHY, shm=None))
    assert [v.name for v in verdicts.values() if v.level != OK] == ["/dev/shm"]


def test_a_torch_that_cannot_be_asked_is_the_only_error() -> None:
    verdicts = check(replace(HEALTHY, torch={"error": "libtorch.so: not found"}))
    assert [v.name for v in verdicts if v.level == ERROR] == ["torch"]
    shown = lines(verdicts, is_coloured=False)
    assert any("libtorch.so: not found" in line for line in shown)
    assert shown[-1] == "1 error, no warnings."


def test_cores_are_shown_as_ranges() -> None:
    facts = replace(HEALTHY, cores=Cores((0, 1, 2, 5), None), cores_of_machine=8)
    assert _by_name(facts)["affinity"].what.endswith("4 of 8: 0-2,5")
