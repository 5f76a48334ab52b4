"""Which way ranks exchange, from the facts that they told each other: on all ranks the same."""

from __future__ import annotations

import json
import platform
from typing import Any

import pytest

from closeranks.exchange import handshake
from closeranks.exchange.choose import decide
from closeranks.exchange.handshake import core_count
from closeranks.segment import kernels


def _facts(
    count: int = 3, exchange: str = "auto", wanted: str = "auto", **others: Any
) -> list[dict[str, Any]]:
    """Ranks that could share memory in every way, but for what is said of rank 1."""
    wishes = {"CLOSERANKS_EXCHANGE": "auto", "CLOSERANKS_KERNELS": "auto", "wire": "exact"}
    ranks: list[dict[str, Any]] = [
        {"wishes": dict(wishes), "host": "a", "unable": "", "kernels": ["c", "python"]}
        for _ in range(count)
    ]
    ranks[1]["wishes"] |= {"CLOSERANKS_EXCHANGE": exchange, "CLOSERANKS_KERNELS": wanted}
    ranks[1].update(others)
    return ranks


def test_ranks_that_can_share_memory_do() -> None:
    choice = decide(_facts())
    assert choice.shm and choice.kernels == "c" and not choice.is_worrying


def test_one_rank_without_a_compiler_has_all_sum_in_python() -> None:
    choice = decide(_facts(kernels=["python"]))
    assert choice.shm and choice.kernels == "python"


def test_kernels_are_those_that_are_wished_for() -> None:
    assert decide(_facts(wanted="python")).kernels == "python"
    assert decide(_facts(wanted="c")).kernels == "c"


def test_kernels_that_are_wished_for_and_missing_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"CLOSERANKS_KERNELS=c, but rank 2 has no C kernels"):
        facts = _facts(wanted="c")
        facts[2]["kernels"] = ["python"]
        decide(facts)
    with pytest.raises(ValueError, match=r"rank 1 is not on x86"):
        decide(_facts(wanted="python", kernels=["c"]))


def test_contrary_wishes_for_kernels_are_an_error() -> None:
    facts = _facts(wanted="c")
    facts[2]["wishes"]["CLOSERANKS_KERNELS"] = "python"
    with pytest.raises(ValueError, match="on some ranks"):
        decide(facts)


def test_without_kernels_for_all_the_group_is_used() -> None:
    """A machine that is not x86, with a compiler on some ranks."""
    choice = decide(_facts(kernels=[]))
    assert not choice.shm and "not x86" in choice.reason


def test_one_rank_can_wish_for_the_group() -> None:
    choice = decide(_facts(exchange="group"))
    assert not choice.shm and choice.reason == "CLOSERANKS_EXCHANGE=group"
    assert not decide(_facts(exchange="group", unable="x", failed=True)).is_worrying


@pytest.mark.parametrize(
    ("others", "said", "worrying"),
    (
        ({"unable": "no space", "failed": True}, "rank 1 cannot share memory: no space", True),
        ({"unable": "no memfd_create", "failed": False}, "rank 1 cannot share memory", False),
        ({"kernels": []}, "C kernels", False),
    ),
)
def test_what_is_in_the_way_is_said(others: dict[str, Any], said: str, worrying: bool) -> None:
    choice = decide(_facts(**others))
    assert not choice.shm and said in choice.reason and choice.is_worrying is worrying
    with pytest.raises(ValueError, match=r"CLOSERANKS_EXCHANGE=shm, but .*" + said) as raised:
        decide(_facts(exchange="shm", **others))
    assert "No rank trains" in str(raised.value)


def test_ranks_on_several_hosts_share_memory_where_two_share_a_host() -> None:
    choice = decide(_facts(host="b"))
    assert choice.shm and choice.kernels == "c" and not choice.by_group
    apart = _facts(count=2, host="b")
    assert not decide(apart).shm and "several hosts" in decide(apart).reason
    assert decide(_facts(exchange="group", host="b")).by_group
    with pytest.raises(ValueError, match=r"CLOSERANKS_EXCHANGE=shm, but .*several hosts"):
        decide(_facts(exchange="shm", host="b"))


@pytest.mark.parametrize("variable", ("CLOSERANKS_EXCHANGE", "CLOSERANKS_KERNELS"))
def test_a_wish_that_means_nothing_is_an_error(variable: str) -> None:
    facts = _facts()
    facts[2]["wishes"][variable] = "fast"
    with pytest.raises(ValueError, match=rf"{variable}='fast' on rank 2: wanted auto"):
        decide(facts)


def test_a_machine_that_is_not_x86_needs_the_kernels_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "python" in kernels.kinds_here() or platform.machine() not in ("x86_64", "AMD64")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "python" not in kernels.kinds_here()
    monkeypatch.setattr(kernels, "library", lambda: None)
    assert kernels.kinds_here() == ()


def test_a_library_of_another_machine_or_version_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    broken = tmp_path / "_kernels.so"
    broken.write_bytes(b"\x7fELF and then nothing")
    assert kernels._load(broken) is None
    monkeypatch.setattr(kernels, "_VERSION", -7)
    assert kernels.library.__wrapped__() is None


def test_hosts_are_told_apart_by_a_name_of_fixed_length(monkeypatch: pytest.MonkeyPatch) -> None:
    here = handshake._host()
    assert here == handshake._host()
    monkeypatch.setenv("CLOSERANKS_HOST", "elsewhere" * 500)
    assert handshake._host() != here
    assert len(json.dumps(handshake._host())) < 100


def test_ranks_that_are_pinned_to_cores_of_their_own_have_as_many_together() -> None:
    assert core_count([{"cores": hex(1 << 3)}, {"cores": hex(1 << 70)}]) == 2
    assert core_count([{"cores": hex(0b1110)}, {"cores": hex(0b0110)}]) == 3
