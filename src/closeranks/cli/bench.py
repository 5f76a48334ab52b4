"""`closeranks bench`: how fast this machine exchanges gradients."""

from __future__ import annotations

import argparse
from pathlib import Path

from closeranks.cli.parser import Commands, value_of
from closeranks.launch.options import parse_workers


def add_bench(commands: Commands) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure all-reduces and steps on this machine, beside gloo and torch's DDP",
        description="Time all-reduces beside gloo's and what memory allows, and training steps "
        "beside torch's DistributedDataParallel, in turns on the same workers, in some minutes. "
        "Nothing else should run meanwhile.",
        allow_abbrev=False,
    )
    bench.add_argument(
        "-n",
        type=value_of(parse_workers),
        metavar="N",
        dest="workers",
        help="workers, at least 2 (default: one for each core)",
    )
    bench.add_argument("--quick", action="store_true", help="few rounds: a look, and noisy")
    bench.add_argument("--json", action="store_true", help="print everything as JSON")
    bench.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw time against size (needs matplotlib)"
    )
    bench.set_defaults(call=_bench)


def _bench(values: argparse.Namespace) -> int:
    from closeranks.bench.command import Wish, bench

    return bench(Wish(values.workers, values.quick, values.json, values.plot))
