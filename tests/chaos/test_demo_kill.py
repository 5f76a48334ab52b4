"""`closeranks demo --kill`, whole: two equal digests, and nothing left."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile


def test_the_demo_kills_and_ends_equal() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "closeranks", "demo", "--kill"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kill -9") == 2
    digests = re.findall(r"^sha256 of weights and optimizer: (\w{64})$", done.stdout, re.MULTILINE)
    assert len(digests) == 2 and digests[0] == digests[1]
