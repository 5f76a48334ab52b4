"""A rank fails: it is named, not the ones that fail because of it, and the others are ended."""

import json
import re
from pathlib import Path

import pytest

from tests.launch.job import Done, run, run_dir

# Rank 1 comes to its end in the way that is asked for, while the others wait for it.
TRAIN = """
    import ctypes, os, signal, sys, time
    import torch, torch.distributed as dist

    def end(how):
        if how == "raise":
            raise ValueError("bad batch 17")
        if how == "chain":
            try:
                {}["x"]
            except KeyError as error:
                raise RuntimeError("first line\\nsecond line") from error
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "segv":
            ctypes.string_at(0)
        if how == "exit":
            sys.exit(3)
        if how == "message":
            sys.exit("no data in the folder")
        if how == "leave":
            os._exit(5)
        if how == "import":
            import no_such_module

    dist.init_process_group("gloo")
    x = torch.ones(3)
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        end(sys.argv[1])
    dist.all_reduce(x)
    time.sleep(60)
"""

CASES = {
    "raise": (1, "rank 1 failed first: ValueError: bad batch 17", "in end: raise Value"),
    "chain": (1, "rank 1 failed first: RuntimeError: first line", "caused by KeyError: 'x'"),
    "kill": (137, "rank 1 was killed by SIGKILL; ", "GB were in use"),
    "segv": (139, "rank 1 was killed by SIGSEGV", "in end: ctypes.string_at(0)"),
    "exit": (3, "rank 1 failed first: sys.exit(3)", "in end: sys.exit(3)"),
    "message": (1, "rank 1 failed first: sys.exit('no data in the folder')", " in end: "),
    "leave": (5, "rank 1 left with exit code 5, without an exception", ""),
    "import": (1, "rank 1 failed first: ModuleNotFoundError: No module named 'no_such", "train.py"),
}


def _assert_is_short_and_alone(done: Done) -> None:
    """At most 15 lines, and nobody's traceback beside them."""
    assert len(done.report) <= 15
    assert "Traceback" not in done.err + done.out
    assert re.search(r"(was|were) stopped|failed after it", done.report[-2]), done.err


@pytest.mark.parametrize("how", CASES)
def test_the_rank_that_failed_first_is_named(tmp_path: Path, how: str) -> None:
    code, first, within = CASES[how]
    done = run(tmp_path, "-n", "4", "train.py", how, script=TRAIN)
    assert done.code == code, done.err
    report = [line for line in done.report if not line.startswith("warning")]
    assert report[0].startswith(first), done.err
    assert any(within in line for line in report), done.err
    assert report[-1].startswith("Logs: runs/train-")
    _assert_is_short_and_alone(done)


def test_without_forking_it_is_told_alike(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "2", "--no-fork", "train.py", "raise", script=TRAIN)
    assert done.code == 1
    assert done.report[0] == "rank 1 failed first: ValueError: bad batch 17"
    _assert_is_short_and_alone(done)


def test_tracebacks_are_in_the_logs(tmp_path: Path) -> None:
    run(tmp_path, "-n", "2", "train.py", "raise", script=TRAIN)
    culprit = (run_dir(tmp_path) / "rank-1.log").read_text()
    assert culprit.count("Traceback (most recent call last)") == 1
    assert "ValueError: bad batch 17" in culprit and "closeranks/launch" not in culprit


def test_torchruns_error_file_is_written(tmp_path: Path) -> None:
    script = """
        import os, sys
        print(os.environ["TORCHELASTIC_ERROR_FILE"])
        raise ValueError("bad batch")
    """
    done = run(tmp_path, "-n", "1", "train.py", script=script)
    told = json.loads(Path(done.out.strip()).read_text())["message"]
    assert told["message"] == "ValueError: bad batch"
    assert "Traceback" in told["extraInfo"]["py_callstack"]


def test_a_script_with_torchs_record_is_told_alike(tmp_path: Path) -> None:
    script = """
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            raise ValueError("bad batch")
        main()
    """
    done = run(tmp_path, "-n", "1", "train.py", script=script)
    assert done.code == 1
    assert done.report[0] == "rank 0 failed first: ValueError: bad batch"


def test_the_exception_decides_who_was_first_and_not_the_exit(tmp_path: Path) -> None:
    """Rank 1 raises first, but takes long to leave; rank 0 raises after it and leaves at once."""
    script = """
        import os, time, atexit
        rank = int(os.environ["RANK"])
        if rank == 1:
            atexit.register(time.sleep, 30)
            raise ValueError("the first")
        time.sleep(0.02)
        raise ConnectionResetError("the second, and only a consequence")
    """
    done = run(tmp_path, "-n", "2", "train.py", script=script)
    assert done.code == 1
    assert done.report[0] == "rank 1 failed first: ValueError: the first"


def test_a_consequence_is_not_the_first_even_if_it_comes_first(tmp_path: Path) -> None:
    script = """
        import os, time
        if os.environ["RANK"] == "0":
            raise RuntimeError("[...] Connection closed by peer [127.0.0.1]:4711")
        time.sleep(0.2)
        os._exit(7)
    """
    done = run(tmp_path, "-n", "2", "train.py", script=script)
    assert done.code == 7
    assert done.report[0] == "rank 1 left with exit code 7, without an exception"


LOADER = """
    import os, time, torch
    class Images(torch.utils.data.Dataset):
        def __len__(self):
            return 100
        def __getitem__(self, index):
            if index == 57 and os.environ["RANK"] == "1":
                raise ValueError("cannot decode image 57")
            return torch.ones(3)
    for batch in torch.utils.data.DataLoader(Images(), 8, num_workers=2):
        pass
    time.sleep(60)
"""
STRANGE = r"""
    import os, sys, time
    if os.environ["RANK"] == "1":
        raise RuntimeError("caf\udce9 \x1b[31mred\x1b[2J \u65e5\u672c [bold]")
    time.sleep(60)
"""
MANY = """
    import os, time
    def deeper(n):
        return deeper(n + 1)
    if os.environ["RANK"] == "1":
        try:
            deeper(0)
        except RecursionError as error:
            raise ExceptionGroup("several", [ValueError("a"), error])
    time.sleep(60)
"""


def test_what_a_loaders_worker_raised_is_told_and_not_its_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "2", "train.py", script=LOADER)
    assert done.code == 1
    assert done.report[0].startswith("rank 1 failed first: ValueError: Caught ValueError in Data")
    assert done.report[1] == "  caused by ValueError: cannot decode image 57"
    assert any('raise ValueError("cannot decode image 57")' in line for line in done.report)
    _assert_is_short_and_alone(done)


def test_a_message_does_nothing_to_the_screen(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "2", "train.py", script=STRANGE)
    assert done.code == 1
    assert done.report[0] == (
        r"rank 1 failed first: RuntimeError: caf\udce9 \x1b[31mred\x1b[2J 日本 [bold]"
    )
    assert "RuntimeError: caf" in (run_dir(tmp_path) / "rank-1.log").read_text()


def test_a_group_is_told_by_its_parts_and_a_recursion_once(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "2", "train.py", script=MANY)
    assert done.report[0] == "rank 1 failed first: ExceptionGroup: several (2 sub-exceptions)"
    assert done.report[1] == "  caused by ValueError: a"
    assert done.report[2].startswith("  caused by RecursionError")
    _assert_is_short_and_alone(done)


def test_what_a_rank_printed_before_it_failed_is_shown(tmp_path: Path) -> None:
    script = "import sys; sys.stdout.write('last words, no newline'); raise ValueError('x')"
    done = run(tmp_path, "-n", "1", "train.py", script=script)
    assert done.out == "last words, no newline\n"


def test_a_rank_that_ends_well_before_the_others_is_no_failure(tmp_path: Path) -> None:
    script = """
        import os, time
        time.sleep(0.5 * int(os.environ["RANK"]))
        print("done")
    """
    done = run(tmp_path, "-n", "2", "train.py", script=script)
    assert (done.code, done.err) == (0, "")
    assert done.lines_of(0) == done.lines_of(1) == ["done"]


def test_all_ranks_start_again_as_often_as_is_allowed(tmp_path: Path) -> None:
    script = """
        import os
        import torch.distributed as dist
        dist.init_process_group("gloo")
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("attempt", attempt)
        dist.barrier()
        if dist.get_rank() == 1 and attempt != "2":
            raise ValueError(f"attempt {attempt}")
        dist.barrier()
        dist.destroy_process_group()
    """
    done = run(tmp_path, "-n", "2", "--max-restarts", "2", "train.py", script=script)
    assert done.code == 0, done
    for rank in range(2):
        assert done.lines_of(rank) == [f"attempt {number}" for number in range(3)]
    assert sum("restart 1 of 2" in line for line in done.report) == 1
    assert sum("restart 2 of 2" in line for line in done.report) == 1


def test_restarts_come_to_an_end(tmp_path: Path) -> None:
    script = "raise ValueError('always')"
    done = run(tmp_path, "-n", "2", "--max-restarts", "1", "train.py", script=script)
    assert done.code == 1
    assert sum("failed first: ValueError: always" in line for line in done.report) == 2
