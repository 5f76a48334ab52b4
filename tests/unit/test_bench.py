"""What follows from measured times: pure."""

from pathlib import Path

from closeranks.bench import allreduce, findings, raw, tables
from closeranks.bench.command import fitting
from closeranks.bench.verdict import verdict

MIB = 1 << 20


def _blocks(slower: float) -> raw.Blocks:
    """Gloo takes 20 ms, ours 2, the limit 1; one rank may be slower than the other."""
    ms = {"gloo": 20.0, "ours, C": 2.0, "limit: in place": 1.0}
    taken = {name: [[slower * each] * 3] * 2 for name, each in ms.items()}
    return raw.Blocks(25 * MIB // 4, taken, {name: [1.0, 2.0] for name in ms})


def _rank(slower: float) -> raw.RankResult:
    per_step = {"no sync": 1.0, "torch": 4.0, "ours": 2.0, "torch view": 4.0, "ours view": 3.0}
    times = {
        name: raw.Times(*([[[slower * ms] * 3] * 2] * 2), [[ms]] * 2)
        for name, ms in per_step.items()
    }
    spans = {"ours": [("exchange", 0, 5), ("backward", 0, 10)]}
    return raw.RankResult(times, spans | {"ours view": spans["ours"]}, 0.0)


def _found() -> tuple[list[allreduce.Result], list[findings.Result]]:
    loads = (0.1, 0.2)
    reduced = allreduce.collect(2, True, loads, [[_blocks(1.0)], [_blocks(1.5)]])
    return reduced, [findings.collect("tiny", loads, True, [_rank(1.0), _rank(2.0)])]


def test_a_repetition_takes_as_long_as_the_slowest_rank() -> None:
    (reduced,), (steps,) = _found()
    assert reduced.ms["gloo"][0] == [30.0] * 3
    assert steps.step_ms["ours"][0] == [4.0] * 3
    assert reduced.ratio_median("ours, C") == 10.0 and reduced.of_limit("ours, C") == 0.5
    assert steps.comparisons["ours"].ratio_median == 0.5


def test_the_verdict_is_one_sentence() -> None:
    assert verdict(*_found()) == (
        "On this machine 2 ranks all-reduce 25 MiB 10.0 times as fast as with gloo, at 50% of what "
        "memory allows, and a step takes these parts of torch DDP's time: 0.50 (160 tiny layers)."
    )


def test_tables_fit_the_usual_terminal() -> None:
    reduced, steps = _found()
    parts = [*tables.allreduce_parts(reduced, 2), tables.step_table(steps, 2), tables.STEP_LEGEND]
    text = tables.as_text(parts)
    assert max(map(len, text.splitlines())) <= tables.WIDTH
    assert "25 MiB, 2 ranks, 2 rounds" in text and "10.0 10.0" in text


def test_a_haul_comes_home_as_it_was(tmp_path: Path) -> None:
    haul = raw.Haul((0.5, 1.5), [_blocks(1.0)], {"tiny": _rank(1.0)})
    haul.write(tmp_path / "rank-0.json")
    assert raw.read(tmp_path / "rank-0.json") == haul


def test_sizes_that_do_not_fit_into_memory_are_left_out() -> None:
    assert fitting((1.0, 25.0, 100.0), ranks=2, free_bytes=10**12) == [1.0, 25.0, 100.0]
    assert fitting((1.0, 25.0, 100.0), ranks=8, free_bytes=8 * 10**9) == [1.0, 25.0]
    assert fitting((1.0, 25.0, 100.0), ranks=64, free_bytes=10**9) == []
