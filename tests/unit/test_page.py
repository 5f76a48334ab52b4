"""Pages, the memory they lie in, and the processes they belong to."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from closeranks.segment import kernels, memory, page
from closeranks.segment.memory import PAGE_BYTES, Memory, attach
from closeranks.segment.page import PAGE_SIZE_BYTES, REGION_COUNT, UNUSABLE, Page, has_reached
from closeranks.segment.peers import Peer, is_stopped, start_time

_KERNELS_C = Path(kernels.__file__).with_name("kernels.c")


def _descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


# The page.


def _page() -> Page:
    return Page(mmap.mmap(-1, PAGE_SIZE_BYTES))


def test_c_repeats_the_offsets_of_the_words() -> None:
    text = _KERNELS_C.read_text()
    found = dict(re.findall(r"\b(ARRIVED|DONE|ASLEEP) = (\d+)", text))
    assert {name: int(value) for name, value in found.items()} == {
        "ARRIVED": page.ARRIVED,
        "DONE": page.DONE,
        "ASLEEP": page.ASLEEP,
    }


def test_words_that_others_wait_for_share_no_cache_line() -> None:
    places = (page.ARRIVED, page.DONE, page.ASLEEP, page.CLOSED, page.NONCE)
    assert len({place // 64 for place in places}) == len(places)
    assert all(place % 64 == 0 for place in places)


def test_every_slot_begins_at_a_cache_line() -> None:
    one = _page()
    for number in range(page.SLOT_COUNT):
        slot = one.slot(number)
        assert len(slot) == page.SLOT_BYTES
        slot[0] = slot[-1] = number + 1
    raw = one.memory[:]
    for number in range(page.SLOT_COUNT):
        assert raw.index(bytes([number + 1]), page.REGIONS) % 64 == 0


def test_regions_are_remembered_for_a_while() -> None:
    one = _page()
    for number in range(REGION_COUNT + 5):
        one.announce_region(number, 100 + number, number % 1000)
    for number in (5, REGION_COUNT - 1, REGION_COUNT + 4):
        assert one.region(number) == (100 + number, number % 1000)
    with pytest.raises(AssertionError, match="announced"):
        one.region(4)
    one.announce_region(7, UNUSABLE, -1)
    assert one.region(7) == (UNUSABLE, -1)
    assert one.slot(0)[0] == 0, "the ring ends before the slots"


def test_every_signature_is_another_one() -> None:
    one = _page()
    first = one.sign()
    assert one.nonce.hex() == first
    assert one.sign() != first


@given(tick=st.integers(0, 1 << 34), ahead=st.integers(0, (1 << 31) - 1))
def test_a_word_has_reached_what_it_has_passed(tick: int, ahead: int) -> None:
    assert has_reached(page.wrapped(tick + ahead), tick)
    assert has_reached(page.wrapped(tick + ahead), page.wrapped(tick))


@given(tick=st.integers(0, 1 << 34), behind=st.integers(1, (1 << 31) - 1))
def test_a_word_has_not_reached_what_is_to_come(tick: int, behind: int) -> None:
    assert not has_reached(page.wrapped(tick), page.wrapped(tick + behind))


# Memory.


def test_memory_is_shared_with_whoever_attaches() -> None:
    made = Memory(3 * PAGE_BYTES + 1)
    assert made.size_bytes == 4 * PAGE_BYTES
    found = attach(os.getpid(), made.fd, made.size_bytes)
    made.map[17] = 5
    assert found[17] == 5
    found[4 * PAGE_BYTES - 1] = 6
    assert made.map[4 * PAGE_BYTES - 1] == 6


def test_a_mapping_keeps_no_descriptor_and_ends_with_its_last_view() -> None:
    made = Memory(1)
    before, place = _descriptors(), "/memfd:closeranks (deleted)"
    found = attach(os.getpid(), made.fd, made.size_bytes)
    assert _descriptors() == before
    view = torch.frombuffer(found, dtype=torch.uint8)[7:9]
    maps = Path("/proc/self/maps").read_text().count(place)
    del found
    made.map[7] = 3
    assert view[0] == 3 and Path("/proc/self/maps").read_text().count(place) == maps
    del view
    assert Path("/proc/self/maps").read_text().count(place) == maps - 1


def test_memory_that_cannot_be_mapped_is_an_error() -> None:
    with pytest.raises(OSError) as raised:
        memory._map(-1, PAGE_BYTES)
    assert raised.value.errno == errno.EBADF


def test_memory_goes_to_no_program_that_is_started() -> None:
    made = Memory(1)
    assert not os.get_inheritable(made.fd)


def test_a_closed_door_keeps_the_memory() -> None:
    made = Memory(1)
    found = attach(os.getpid(), made.fd, made.size_bytes)
    fd = made.fd
    made.close_door()
    made.close_door()
    with pytest.raises(OSError):
        attach(os.getpid(), fd, made.size_bytes)
    made.map[0] = 9
    assert found[0] == 9


def test_memory_that_nobody_has_leaves_no_descriptor() -> None:
    before = _descriptors()
    made = Memory(1)
    del made
    assert _descriptors() == before


def test_memory_that_cannot_be_allocated_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(fd: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = _descriptors()
    with pytest.raises(OSError, match="No space"):
        Memory(1)
    assert _descriptors() == before


def test_memory_of_another_size_is_refused() -> None:
    made = Memory(1)
    before = _descriptors()
    with pytest.raises(OSError, match="not the memory"):
        attach(os.getpid(), made.fd, made.size_bytes + 1)
    assert _descriptors() == before


def test_a_system_without_the_means_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.is_possible() == ""
    monkeypatch.delattr(os, "memfd_create")
    assert "memfd_create" in memory.is_possible()


# Peers.


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def test_a_peer_is_known_to_be_gone(process: subprocess.Popen[bytes]) -> None:
    peer = Peer(process.pid, start_time(process.pid))
    assert not peer.is_gone()
    process.kill()
    _until(peer.is_gone)
    process.wait()
    assert peer.is_gone(), "also when its parent has heard of it"


def test_a_pid_that_was_given_to_another_process_is_refused(
    process: subprocess.Popen[bytes],
) -> None:
    before = _descriptors()
    with pytest.raises(ProcessLookupError, match="another one"):
        Peer(process.pid, start_time(process.pid) - 1)
    assert _descriptors() == before


def test_a_pid_of_nobody_is_refused() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(OSError):
        Peer(gone.pid, 1)


def test_a_peer_that_is_forgotten_leaves_no_descriptor(process: subprocess.Popen[bytes]) -> None:
    before = _descriptors()
    peer = Peer(process.pid, start_time(process.pid))
    assert _descriptors() != before
    del peer
    gc.collect()
    assert _descriptors() == before


def test_a_stopped_process_is_known_as_such(process: subprocess.Popen[bytes]) -> None:
    assert not is_stopped(process.pid)
    process.send_signal(signal.SIGSTOP)
    _until(lambda: is_stopped(process.pid))
    process.send_signal(signal.SIGCONT)
    _until(lambda: not is_stopped(process.pid))
    assert not is_stopped(1 << 22), "there is no such process"


def test_a_name_with_brackets_and_spaces_confuses_nobody() -> None:
    program = (
        "import ctypes, time; ctypes.CDLL(None).prctl(15, b'a) T (b 7'); "
        "print(flush=True); time.sleep(60)"
    )
    odd = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert odd.stdout is not None
        odd.stdout.readline()
        assert "a) T (b 7" in Path(f"/proc/{odd.pid}/stat").read_text()
        assert not is_stopped(odd.pid)
        assert start_time(odd.pid) >= start_time(os.getpid())
    finally:
        odd.kill()
        odd.wait()


def _until(holds: object, deadline_s: float = 20.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
