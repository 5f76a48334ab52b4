"""A job that goes well: who the workers are, what is shown, and what is in the logs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.job import launched, run, run_dir

WHO = """
    import json, os, sys
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
             "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT",
             "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"]
    facts = {name: os.environ[name] for name in names}
    facts["argv"] = sys.argv
    facts["main"] = __name__
    facts["ppid"] = os.getppid()
    facts["pid"] = os.getpid()
    facts["leads"] = os.getpgrp() == os.getpid()
    facts["cpus"] = sorted(os.sched_getaffinity(0))
    facts["path"] = sys.path[0]
    facts["launcher"] = int(os.environ["CLOSERANKS_LAUNCHER"])
    facts["title"] = open("/proc/self/cmdline").read().strip("\\0")
    print(json.dumps(facts))
"""


@pytest.mark.parametrize("way", [[], ["--no-fork"]], ids=["forked", "anew"])
def test_workers_know_their_place(tmp_path: Path, way: list[str]) -> None:
    done = run(tmp_path, *way, "-n", "2", "train.py", "--epochs", "3", "-n", "9", script=WHO)
    assert done.code == 0, done
    facts = [json.loads(done.lines_of(rank)[0]) for rank in range(2)]
    cores = os.sched_getaffinity(0)
    for rank, each in enumerate(facts):
        for name in ("RANK", "LOCAL_RANK", "ROLE_RANK"):
            assert each[name] == str(rank)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"):
            assert each[name] == "2"
        assert each["MASTER_ADDR"] == "127.0.0.1"
        assert (each["GROUP_RANK"], each["GROUP_WORLD_SIZE"]) == ("0", "1")
        assert each["OMP_NUM_THREADS"] == str(max(1, len(cores) // 2))
        assert each["argv"] == ["train.py", "--epochs", "3", "-n", "9"]
        assert each["main"] == "__main__" and each["path"] == str(tmp_path)
        assert each["ppid"] == each["launcher"] and each["leads"]
        assert each["title"].startswith(f"rank {rank}: train.py --epochs 3")
        assert len(each["cpus"]) == max(1, len(cores) // 2) or len(cores) == 1
    if len(cores) > 1:
        assert not set(facts[0]["cpus"]) & set(facts[1]["cpus"])
    workers = json.loads((run_dir(tmp_path) / "workers.json").read_text())
    assert workers["launcher"] == facts[0]["launcher"]
    assert workers["workers"] == {"0": facts[0]["pid"], "1": facts[1]["pid"]}


def test_as_many_workers_as_cores_without_a_number(tmp_path: Path) -> None:
    done = run(tmp_path, "train.py", script="import os; print(os.environ['WORLD_SIZE'])")
    cores = len(os.sched_getaffinity(0))
    assert done.code == 0
    assert done.out.count(f"{cores}\n") == cores


def test_one_worker_has_no_prefix(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "1", "train.py", script="print('as it is')")
    assert (done.code, done.out, done.err) == (0, "as it is\n", "")


def test_a_module_is_run_as_python_would(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])")
    done = run(tmp_path, "-n", "1", "-m", "pack.train", "--x")
    assert (done.code, done.out) == (0, "__main__ pack ['--x']\n")


def test_standard_output_and_error_stay_apart(tmp_path: Path) -> None:
    script = "import sys; print('to out'); print('to err', file=sys.stderr)"
    done = run(tmp_path, "-n", "2", "train.py", script=script)
    assert sorted(done.out.splitlines()) == ["rank 0 | to out", "rank 1 | to out"]
    assert sorted(done.err.splitlines()) == ["rank 0 | to err", "rank 1 | to err"]


def test_one_rank_is_shown_and_all_are_logged(tmp_path: Path) -> None:
    script = "import os; print('I am', os.environ['RANK'])"
    done = run(tmp_path, "-n", "3", "--show", "1", "train.py", script=script)
    assert done.out == "rank 1 | I am 1\n"
    logs = {log.name: log.read_text() for log in run_dir(tmp_path).glob("rank-*.log")}
    assert logs == {f"rank-{rank}.log": f"I am {rank}\n" for rank in range(3)}


def test_lines_are_never_torn_nor_interpreted(tmp_path: Path) -> None:
    """1 MB from each of eight ranks at once, in pieces that end in the middle of lines."""
    script = """
        import os
        rank = os.environ["RANK"]
        line = f"<{rank}> [bold red]{'x' * 300}[/] %s \\\\ end\\n".encode()
        data = line * 3200
        for start in range(0, len(data), 7001):
            os.write(1, data[start : start + 7001])
    """
    done = run(tmp_path, "-n", "8", "train.py", script=script)
    assert done.code == 0
    lines = done.out.splitlines()
    assert len(lines) == 8 * 3200
    whole = re.compile(r"rank (\d) \| <(\d)> \[bold red\]x{300}\[/\] %s \\ end")
    matches = [whole.fullmatch(line) for line in lines]
    assert all(match and match[1] == match[2] for match in matches)
    for rank in range(8):
        log = (run_dir(tmp_path) / f"rank-{rank}.log").read_text()
        assert log.splitlines() == done.lines_of(rank)


def test_names_and_folders_are_the_users(tmp_path: Path) -> None:
    arguments = ["-n", "1", "--log-dir", "logs", "--name", "first", "train.py"]
    done = run(tmp_path, *arguments, script="print(1)")
    assert done.code == 0
    assert (tmp_path / "logs" / "first" / "rank-0.log").read_text() == "1\n"
    again = run(tmp_path, *arguments)
    assert again.code == 2 and again.out == ""
    assert "already holds the logs of a job" in again.err and len(again.err.splitlines()) == 1


def test_ranks_meet_on_loopback_and_nowhere_else(tmp_path: Path) -> None:
    """A plain torch script: no port is chosen by anybody, and nothing listens to the network."""
    script = """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.ones(3)
        dist.all_reduce(x)
        inodes = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                  if os.path.exists(f"/proc/self/fd/{fd}")}
        lines = [l.split() for name in ("tcp", "tcp6") for l in open(f"/proc/self/net/{name}")]
        bound = {l[1].split(":")[0] for l in lines[1:]
                 if l[3] == "0A" and f"socket:[{l[9]}]" in inodes}
        print(x[0].item(), sorted(bound))
        dist.barrier()
        dist.destroy_process_group()
    """
    done = run(tmp_path, "-n", "2", "train.py", script=script)
    assert done.code == 0, done
    assert [done.lines_of(rank) for rank in range(2)] == [["2.0 ['0100007F']"]] * 2, done.out


def test_children_of_scripts_find_the_scripts_classes(tmp_path: Path) -> None:
    """multiprocessing imports the parent's main module anew, by the name that we gave it."""
    script = """
        import multiprocessing
        class Thing:
            pass
        def work(thing):
            return type(thing).__name__
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(work, [Thing()]))
    """
    done = run(tmp_path, "-n", "1", "train.py", script=script)
    assert (done.code, done.out) == (0, "['Thing']\n"), done


def test_forked_workers_draw_different_random_numbers(tmp_path: Path) -> None:
    script = "import numpy, random; print(numpy.random.rand(), random.random())"
    done = run(tmp_path, "-n", "2", "train.py", script=script)
    (first,), (second,) = done.lines_of(0), done.lines_of(1)
    assert not set(first.split()) & set(second.split())


def test_what_is_piped_in_reaches_a_worker(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.stdin.read().upper())")
    done = subprocess.run(
        [sys.executable, "-m", "closeranks", "run", "-n", "1", "train.py"],
        cwd=tmp_path,
        input="some words",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "SOME WORDS\n"


def test_a_reader_that_goes_away_does_not_end_the_job(tmp_path: Path) -> None:
    script = "import time\nfor i in range(200): print(i); time.sleep(0.005)"
    (tmp_path / "train.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, "-m", "closeranks", "run", "-n", "1", "train.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0
    assert (run_dir(tmp_path) / "rank-0.log").read_text().endswith("199\n")


def test_more_workers_than_cores_are_warned_of(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    script = "import os; print(len(os.sched_getaffinity(0)))"
    done = run(tmp_path, "-n", str(cores + 1), "--show", "0", "train.py", script=script)
    assert (done.code, done.out) == (0, f"rank 0 | {cores}\n")
    noun = "core" if cores == 1 else "cores"
    assert done.report == [f"warning: {cores + 1} workers share {cores} {noun}"]


def test_64_workers_start_and_stop(tmp_path: Path) -> None:
    """That they also step together is a test of minutes, in tests/chaos."""
    script = "import os; print(os.environ['RANK'], os.environ['OMP_NUM_THREADS'])"
    done = run(tmp_path, "-n", "64", "train.py", script=script)
    assert done.code == 0, done
    assert [done.lines_of(rank) for rank in range(10, 64)] == [[f"{r} 1"] for r in range(10, 64)]
    workers = json.loads((run_dir(tmp_path) / "workers.json").read_text())["workers"]
    assert list(workers) == [str(rank) for rank in range(64)]


def test_the_launcher_is_small_and_starts_no_torch(tmp_path: Path) -> None:
    """An import of torch takes more than a second of processor time, the launcher a tenth of it;
    on a busy machine both take longer, on the wall as long as it likes.
    """
    (tmp_path / "train.py").write_text("import time; print('up'); time.sleep(30)")
    with launched(tmp_path, "-n", "1", "train.py") as running:
        running.wait_for(running.has_said("up"), "start")
        pid = running.process.pid
        maps = Path(f"/proc/{pid}/maps").read_text()
        status = Path(f"/proc/{pid}/status").read_text()
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        resident = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1])  # type: ignore[index]
        running.send(2)
        assert running.end().code == 130
    assert "libtorch" not in maps
    assert resident < 30_000, f"{resident} kB"
    assert sum(map(int, times)) / os.sysconf("SC_CLK_TCK") < 0.5, times


def test_a_log_dir_that_cannot_be_written_is_replaced_with_a_warning(tmp_path: Path) -> None:
    """A file where the folder should be stops even root, whom permissions do not stop."""
    (tmp_path / "runs").write_text("")
    done = run(tmp_path, "-n", "1", "train.py", script="print(1)")
    assert (done.code, done.out) == (0, "1\n")
    (warning,) = done.report
    folder = Path(warning.rpartition("logs are in ")[2])
    assert (folder / "rank-0.log").read_text() == "1\n"
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def test_a_wire_format_reaches_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import os; print(os.environ.get('CLOSERANKS_WIRE', 'none'))"
    monkeypatch.setenv("CLOSERANKS_WIRE", "bf16")
    for name, way, wanted in (("a", ["--wire", "int8"], "int8"), ("b", [], "bf16")):
        folder = tmp_path / name
        folder.mkdir()
        done = run(folder, *way, "-n", "2", "train.py", script=script)
        assert done.code == 0, done
        assert [done.lines_of(rank) for rank in range(2)] == [[wanted], [wanted]]


def test_a_wire_format_that_does_not_exist_is_an_error_of_every_rank(tmp_path: Path) -> None:
    script = """
        import torch, closeranks
        closeranks.init()
        closeranks.DistributedDataParallel(torch.nn.Linear(2, 2))
    """
    done = run(tmp_path, "--wire", "int9", "-n", "2", "train.py", script=script)
    assert done.code != 0
    said = done.out + done.err
    assert "wire='int9' on rank 0" in said and "powersgd:RANK" in said, said
