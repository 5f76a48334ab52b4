"""closeranks.progress with real ranks: one line for all of them, or a bar on a terminal."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.launch.job import run
from tests.launch.terminal import on_terminal

LOOP = """
    import os, sys, time
    import closeranks
    class Batch:
        shape = (16, 3)
    for batch in (bar := closeranks.progress([Batch()] * int(sys.argv[1]), epoch=1)):
        time.sleep(0.01)
        bar.show(loss=lambda: 0.25, rank=os.environ["RANK"])
"""
SLOW = """
    import os, time, torch, closeranks
    world = closeranks.init()
    model = closeranks.DistributedDataParallel(torch.nn.Linear(4, 1))
    for x in closeranks.progress([torch.ones(8, 4)] * 60):
        if world.rank == 1:
            time.sleep(0.05)
        model(x).sum().backward()
"""


def test_one_line_says_it_for_all_ranks(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "3", "train.py", "50", script=LOOP)
    assert (done.code, done.out) == (0, "")
    last = done.report[-1]
    assert re.fullmatch(
        r"step 50/50 \(100%\), [\d.]+ steps/s, [\d.k]+ samples/s, in 0:\d\d, "
        r"epoch 1, loss 0.25, rank 0",
        last,
    ), last


def test_a_long_loop_tells_now_and_then(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "1", "train.py", "800", script=LOOP)
    assert done.code == 0
    assert any(re.match(r"step \d+/800 \(\d+%\), .* eta 0:0", line) for line in done.report)


def test_the_rank_that_others_wait_for_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "2", "train.py", script=SLOW)
    assert done.code == 0, done
    assert done.report[-1].endswith("rank 1 is slowest")


def test_without_our_launcher_rank_0_tells_by_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import closeranks\nfor i in closeranks.progress(range(10), a=1): pass\n"
    )
    for rank, said in (("0", r"step 10/10 \(100%\), .*, in 0:00, a 1\n"), ("1", "")):
        env = os.environ | {"RANK": rank, "WORLD_SIZE": "2"}
        command = [sys.executable, "train.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0 and done.stdout == ""
        assert re.fullmatch(said, done.stderr), done.stderr


def test_on_a_terminal_there_is_a_bar_below_the_output(tmp_path: Path) -> None:
    script = LOOP + "        print('said', bar._step)\n"
    done = on_terminal(tmp_path, "-n", "2", "train.py", "120", script=script)
    assert done.code == 0
    assert "━" in done.text and "\x1b[2K" in done.text
    assert "\x1b[36mrank 0\x1b[0m | said 3" in done.text
    assert "\x1b[32mrank 1\x1b[0m | said 3" in done.text
    bars = [part for part in re.split(r"\r\x1b\[2K|\r?\n", done.text) if "━" in part]
    widths = [len(re.sub(r"\x1b\[[\d;]*m", "", bar)) for bar in bars]
    assert bars and max(widths) <= 100
    assert re.search(r"step 120/120 \(100%\)", done.text)


def test_ctrl_c_on_a_terminal_leaves_one_line(tmp_path: Path) -> None:
    """The terminal sends it to everybody in its foreground, so nobody else must be there."""
    script = "import time\nprint('up')\ntime.sleep(300)\n"
    for way in ([], ["--no-fork"]):
        done = on_terminal(tmp_path, *way, "-n", "2", "train.py", script=script, until="rank 1")
        assert done.code == 130
        assert "Traceback" not in done.text, done.text
        lines = [line for line in done.text.splitlines() if "closeranks:" in line]
        assert len(lines) == 1 and "interrupted: stopping 2 workers" in lines[0]


def test_no_colour_where_none_is_wanted(tmp_path: Path) -> None:
    script = "print('plain')"
    env = {"NO_COLOR": "1"}
    done = on_terminal(tmp_path, "-n", "2", "train.py", script=script, env=env)
    assert "rank 0 | plain" in done.text
