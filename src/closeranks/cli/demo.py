"""`closeranks demo`: two small trainings under our own launcher."""

from __future__ import annotations

import argparse
import importlib.util

from closeranks.cli.parser import Commands, value_of
from closeranks.launch.options import RunOptions, parse_workers


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
    demo.set_defaults(call=_demo)


def _demo(values: argparse.Namespace) -> int:
    from closeranks.launch.run import run

    if importlib.util.find_spec("sklearn") is None:
        raise ValueError(
            "the digits of the demo come with scikit-learn, which is not installed. Nothing was "
            "started; `pip install 'closeranks[demo]'` brings it"
        )
    arguments = ("--quick",) if values.quick else ()
    options = RunOptions("closeranks.demo", arguments, is_module=True, workers=values.workers)
    return run(options)
