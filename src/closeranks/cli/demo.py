"""`closeranks demo`: small trainings under our own launcher, in peace and with workers killed."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path

from closeranks.cli.parser import Commands, value_of
from closeranks.launch.options import RunOptions, parse_workers

_WORKERS_TO_KILL = 3


def add_demo(commands: Commands) -> None:
    demo = commands.add_parser(
        "demo",
        help="train two small models on real data, and prove that the replicas are equal",
        description="Train a convolutional net on scikit-learn's digits and a character GPT on "
        "the source of Python's standard library, under `closeranks run`, in a minute or two; show "
        "progress, throughput, accuracy and loss, and prove by their hashes that the replicas are "
        "equal.",
        allow_abbrev=False,
    )
    demo.add_argument(
        "-n", type=value_of(parse_workers), metavar="N", dest="workers", help="workers"
    )
    demo.add_argument("--quick", action="store_true", help="a tenth of the steps")
    demo.add_argument(
        "--kill",
        action="store_true",
        help="instead: train twice, the second time with two workers killed on the way, and "
        "compare all bits",
    )
    demo.set_defaults(call=_demo)


def _demo(values: argparse.Namespace) -> int:
    from closeranks.launch.run import run

    if importlib.util.find_spec("sklearn") is None:
        raise ValueError(
            "the digits of the demo come with scikit-learn, which is not installed. Nothing was "
            "started; `pip install 'closeranks[demo]'` brings it"
        )
    if values.kill:
        if values.quick:
            raise ValueError("--quick is for the demo without --kill. Nothing was started")
        if values.workers == 1:
            raise ValueError(
                "-n 1: there must be two workers, so that one is left. Nothing started"
            )
        return _kill(values.workers or _WORKERS_TO_KILL)
    arguments = ("--quick",) if values.quick else ()
    options = RunOptions("closeranks.demo", arguments, is_module=True, workers=values.workers)
    return run(options)


def _kill(workers: int) -> int:
    """Train in peace, then with kills; the digests must be equal."""
    from closeranks.launch.run import run

    digests: list[str] = []
    with tempfile.TemporaryDirectory(prefix="closeranks-demo-") as folder:
        for title, more in (("in peace", ("--in-peace",)), ("and now killed", ())):
            sys.stdout.write(f"\n{workers} workers, {title}:\n")
            sys.stdout.flush()
            result = Path(folder) / f"digest-{len(digests)}"
            options = RunOptions(
                "closeranks.demo.kill",
                (f"--result={result}", *more),
                is_module=True,
                workers=workers,
                log_dir=Path(folder),
                preload=("sklearn.datasets",),
            )
            code = run(options)
            if code:
                return code
            digests.append(result.read_text())
    are_equal = digests[0] == digests[1]
    verdict = "Equal in every bit." if are_equal else "NOT EQUAL: the training was wrong."
    sys.stdout.write(f"\n{verdict}\n")
    return 0 if are_equal else 1
