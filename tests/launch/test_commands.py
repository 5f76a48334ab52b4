"""The other commands as a user types them: doctor, demo, help, and what is typed wrongly."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def closeranks(
    folder: Path, *arguments: str, env: dict[str, str] | None = None, deadline_s: float = 150.0
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "closeranks", *arguments],
        cwd=folder,
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        timeout=deadline_s,
    )


def test_the_doctor_looks_at_this_machine(tmp_path: Path) -> None:
    done = closeranks(tmp_path, "doctor", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == (0 if told["ok"] else 1), done
    verdicts = {each["name"]: each for each in told["checks"]}
    assert {"cores", "affinity", "threads", "memory", "/dev/shm", "torch"} <= verdicts.keys()
    assert {"backends", "C kernels", "interfaces", "nofile", "memlock", "nproc"} <= verdicts.keys()
    assert verdicts["torch"]["level"] == "ok" and "2." in verdicts["torch"]["what"]
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_finds_what_is_wrong(tmp_path: Path) -> None:
    """A torch that cannot be imported, and an interface that is not there."""
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: not found')")
    env = {"PYTHONPATH": str(tmp_path), "GLOO_SOCKET_IFNAME": "ib7", "NO_COLOR": "1"}
    done = closeranks(tmp_path, "doctor", env=env)
    assert done.returncode == 1 and done.stderr == ""
    assert re.search(r"error +torch +cannot be asked: ImportError: libtorch.so", done.stdout)
    assert re.search(r"error +interfaces +GLOO_SOCKET_IFNAME=ib7, but there is no ib7", done.stdout)
    assert "-> unset it" in done.stdout
    assert re.search(r"2 errors, (no|\d+) warnings?\.$", done.stdout.strip())


def test_the_demo_trains_twice_and_proves_it(tmp_path: Path) -> None:
    done = closeranks(tmp_path, "demo", "-n", "2", "--quick")
    assert done.returncode == 0, done
    lines = [line.removeprefix("rank 0 | ") for line in done.stdout.splitlines()]
    assert lines.count("  The 2 replicas are equal in every bit.") == 2
    assert sum(bool(re.match(r"  rank [01]: +\d+ (images|windows)/s", line)) for line in lines) == 4
    held_out = [re.match(r"  held out: loss ([\d.]+), accuracy ([\d.]+)%", line) for line in lines]
    digits, gpt = (m for m in held_out if m)
    assert float(digits[2]) > 80 and float(gpt[1]) < 4.0  # a guess: 10 %, and 4.6 nats
    digests = [
        line.split(": ")[1] for line in lines if re.match(r"  rank [01]: [0-9a-f]{64}", line)
    ]
    assert digests[0] == digests[1] != digests[2] == digests[3]
    assert re.search(r"closeranks: step 40/40 \(100%\), .* samples/s", done.stderr)


def test_the_bench_measures_this_machine(tmp_path: Path) -> None:
    done = closeranks(tmp_path, "bench", "-n", "2", "--quick", "--json", "--plot", "out.png")
    assert done.returncode == 0, done
    told = json.loads(done.stdout)
    assert [each["size_bytes"] for each in told["allreduce"]] == [4 << 10, 1 << 20, 25 << 20]
    for each in told["allreduce"]:
        assert {"gloo", "ours, C", "door 2, C", "limit: in place"} <= each["ms"].keys()
    assert [each["case"] for each in told["steps"]] == ["tiny", "mlp16"]
    for each in told["steps"]:
        assert {"no sync", "torch", "ours"} <= each["step_ms"].keys()
        assert each["difference"] < 1e-5  # it was the same work
    assert re.match(r"On this machine 2 ranks all-reduce 25 MiB [\d.]+ times", told["verdict"])
    assert told["verdict"].count(".\n") == 0 and told["verdict"].endswith(").")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["out.png"]


@pytest.mark.parametrize(
    ("command", "lacks", "extra"), [("demo", "sklearn", "demo"), ("bench", "matplotlib", "plot")]
)
def test_what_is_lacking_is_named(tmp_path: Path, command: str, lacks: str, extra: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        f"u.find_spec = lambda name, *a: None if name == '{lacks}' else find(name, *a)\n"
    )
    options = ["--plot", "out.png"] if command == "bench" else []
    done = closeranks(tmp_path, command, *options, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"pip install 'closeranks[{extra}]'" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", [[], ["run"], ["demo"], ["bench"], ["doctor"]])
def test_help_is_on_standard_output(tmp_path: Path, command: list[str]) -> None:
    done = closeranks(tmp_path, *command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: closeranks")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--no-such", "train.py"], "--no-such: no such option"),
        (["run"], "name a script to run"),
        (["run", "nowhere.py"], "nowhere.py is not there. Nothing was started"),
        (["run", "."], ". is a folder, not a script"),
        (["run", "-m", "no.such"], "there is no module no"),
        (["run", "-n", "0", "train.py"], "-n 0: a job has 1 to 4096 workers"),
        (["run", "-n", "-3", "train.py"], "-n -3: a job has 1 to 4096 workers"),
        (["run", "-n", "two", "train.py"], "-n two: a whole number"),
        (["run", "--show", "x", "train.py"], "--show x: ranks like 0"),
        (["run", "--name", "a/b", "train.py"], "without a slash"),
        (["run", "--max-restarts", "-1", "train.py"], "--max-restarts -1: at least 0"),
        (["run", "--hang-timeout", "0", "train.py"], "--hang-timeout 0: seconds, more than 0"),
        (["run", "--hang-timeout", "nan", "train.py"], "--hang-timeout nan: seconds"),
        (["run", "--log-dir", "train.py/logs", "train.py"], "--log-dir train.py/logs cannot be"),
        (["doctor", "--fast"], "--fast: no such option (`closeranks doctor --help`"),
        (["demo", "-n", "0"], "-n 0: a job has"),
        (["bench", "-n", "1"], "-n 1: there is nothing to exchange"),
        (["bench", "--plot", "no/such/out.png"], "--plot no/such/out.png: name a file"),
        (["trian"], "trian"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "train.py").write_text("print('started')")
    done = closeranks(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and said in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
