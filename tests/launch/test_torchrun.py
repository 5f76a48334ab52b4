"""Commands that were written for torchrun: they work as they are, and say what is needless."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.launch.job import launched, run

WHO = """
    import json, os, sys
    print(json.dumps(dict(os.environ) | {"argv": sys.argv[1:]}))
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--standalone", "--nproc_per_node=2"], []),
        (["--nnodes=1", "--nproc-per-node", "2", "--rdzv-endpoint=localhost:0"], []),
        (
            ["--nnodes=1:1", "--nproc_per_node=2", "--rdzv_backend=c10d", "--rdzv_id=7"],
            ["--rdzv-backend is needless here: launchers meet in one way"],
        ),
        (
            ["--nproc-per-node=2", "-t", "3", "--redirects", "3", "--start_method=spawn"],
            [
                "--start-method is needless here: --no-fork is the choice there is",
                "--tee is needless here: output is always shown and logged",
                "--redirects is needless here: output is always shown and logged; --show chooses "
                "ranks",
            ],
        ),
    ],
)
def test_its_options_are_taken(tmp_path: Path, arguments: list[str], said: list[str]) -> None:
    done = run(tmp_path, *arguments, "train.py", "--tee", "5", script=WHO)
    assert done.code == 0, done
    assert done.report == [f"warning: {line}" for line in said]
    for rank in range(2):
        told = json.loads(done.lines_of(rank)[0])
        assert (told["RANK"], told["WORLD_SIZE"]) == (str(rank), "2")
        assert told["argv"] == ["--tee", "5"]


def test_what_it_names_is_so(tmp_path: Path) -> None:
    arguments = ["--nproc-per-node=2", "--role", "trainer", "--rdzv-id=job7"]
    filtered = ["--local_ranks_filter", "1", "--max_restarts=3", "--shutdown_timeout", "5"]
    done = run(tmp_path, *arguments, *filtered, "train.py", script=WHO)
    assert done.code == 0 and done.lines_of(0) == []
    told = json.loads(done.lines_of(1)[0])
    assert (told["ROLE_NAME"], told["TORCHELASTIC_RUN_ID"]) == ("trainer", "job7")
    assert told["TORCHELASTIC_MAX_RESTARTS"] == "3"


def test_its_variables_are_read_and_the_command_line_goes_before_them(tmp_path: Path) -> None:
    env = {"PET_NPROC_PER_NODE": "3", "PET_NNODES": "1", "PET_ROLE": "a", "PET_STANDALONE": "1"}
    with launched(tmp_path, "--role", "b", "train.py", script=WHO, env=env) as running:
        done = running.end()
    assert done.code == 0, done
    told = [json.loads(done.lines_of(rank)[0]) for rank in range(3)]
    assert {each["WORLD_SIZE"] for each in told} == {"3"}
    assert {each["ROLE_NAME"] for each in told} == {"b"}


def test_a_variable_that_is_wrong_is_one_line(tmp_path: Path) -> None:
    env = {"PET_NPROC_PER_NODE": "many"}
    with launched(tmp_path, "train.py", script=WHO, env=env) as running:
        done = running.end()
    assert done.code == 2 and done.report == [
        "-n many: a whole number, or 'auto' (`closeranks run --help` shows what there is)"
    ]


def test_the_port_is_the_one_that_was_named(tmp_path: Path) -> None:
    script = """
        import os, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        print(os.environ["MASTER_PORT"])
        dist.destroy_process_group()
    """
    done = run(tmp_path, "--nproc-per-node=2", "--master_port=29517", "train.py", script=script)
    assert done.code == 0 and done.lines_of(0) == done.lines_of(1) == ["29517"]


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run(tmp_path, "-n", "1", "--master-port", port, "train.py", script=WHO)
    assert (done.code, done.out) == (2, "")
    assert done.report == [
        f"--master-port {port}: Address already in use. Nothing was started; leave it out, and "
        "any free port is used"
    ]
    assert not (tmp_path / "runs").exists()


def test_a_program_that_is_not_python_is_run_as_it_is(tmp_path: Path) -> None:
    """Its ranks meet as well, although nobody serves their store but rank 0."""
    script = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.ones(1)
        dist.all_reduce(x)
        print(int(x))
        dist.barrier()
        dist.destroy_process_group()
    """
    (tmp_path / "start.sh").write_text('#!/bin/sh\nexec "$PYTHON" "$@"\n')
    (tmp_path / "start.sh").chmod(0o755)
    import sys

    env = {"PYTHON": sys.executable}
    arguments = ["-n", "2", "--no-python", "./start.sh", "train.py"]
    with launched(tmp_path, *arguments, script=script, env=env) as running:
        done = running.end()
    assert done.code == 0 and done.lines_of(0) == done.lines_of(1) == ["2"], done


def test_how_a_program_ends_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "2", "--no-python", "sh", "-c", "exit 7")
    assert done.code == 7
    assert "left with exit code 7, without an exception" in done.report[0]
    done = run(tmp_path, "-n", "2", "--no-python", "./nowhere")
    assert done.code == 2 and "./nowhere cannot be run" in done.err


def test_the_entry_in_the_shell_is_the_same_command(tmp_path: Path) -> None:
    import sys

    (tmp_path / "train.py").write_text("print('up')")
    command = [str(Path(sys.executable).with_name("closeranks")), "run", "-n", "1", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "up\n", "")
