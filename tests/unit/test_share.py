"""How a machine's cores and GPUs are shared out, and how the kernel's texts are read: pure."""

import pytest

from closeranks.launch.machine import (
    Cores,
    Memory,
    parse_cpu_max,
    parse_meminfo,
    parse_visible_devices,
)
from closeranks.launch.share import share_out

EIGHT = Cores(tuple(range(8)), None)


@pytest.mark.parametrize(
    ("wanted", "cores", "gpus", "workers", "threads"),
    [
        (None, EIGHT, 0, 8, 1),  # one for each core
        (None, EIGHT, 2, 2, 4),  # one for each GPU
        (3, EIGHT, 0, 3, 2),
        (64, EIGHT, 0, 64, 1),
        (None, Cores((2, 5), None), 0, 2, 1),  # an affinity
        (None, Cores(tuple(range(8)), 2.5), 0, 2, 1),  # a control group's time
        (2, Cores(tuple(range(8)), 4.0), 0, 2, 2),
        (None, Cores(tuple(range(8)), 0.5), 0, 1, 1),
    ],
)
def test_workers_and_threads(
    wanted: int | None, cores: Cores, gpus: int, workers: int, threads: int
) -> None:
    share = share_out(wanted, cores, gpus)
    assert (share.workers, share.threads) == (workers, threads)
    assert len(share.cpus) == workers and share.reason


def test_each_worker_has_cores_of_its_own() -> None:
    share = share_out(3, EIGHT, 0)
    assert share.cpus == ((0, 1), (2, 3), (4, 5)) and share.warning == ""
    assert share_out(2, Cores((1, 3, 5, 7), None), 0).cpus == ((1, 3), (5, 7))


def test_more_workers_than_cores_are_not_pinned_and_warned_of() -> None:
    share = share_out(3, Cores((0, 1), None), 0)
    assert share.cpus == ((), (), ()) and share.warning == "3 workers share 2 cores"
    assert share_out(3, EIGHT, 1).warning == "3 workers share 1 GPU"


@pytest.mark.parametrize(
    ("text", "cores"),
    [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None), ("-1 100000", None)],
)
def test_the_quota_of_a_control_group(text: str, cores: float | None) -> None:
    assert parse_cpu_max(text) == cores


def test_memory_that_is_not_available_is_in_use() -> None:
    text = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\n"
    assert parse_meminfo(text) == Memory(400 * 1024, 1000 * 1024)
    assert Memory(14_200_000_000, 23_000_000_000).shown() == "14.2 of 23.0 GB were in use"


@pytest.mark.parametrize(
    ("text", "devices"),
    [("0,2", ["0", "2"]), ("", []), ("-1", []), ("0,-1,2", ["0"]), ("GPU-3f, 1", ["GPU-3f", "1"])],
)
def test_visible_devices(text: str, devices: list[str]) -> None:
    assert parse_visible_devices(text) == devices
