"""The command line: `closeranks run | demo | bench | doctor`. Parses, then calls one function.

Imports what a command needs when it is asked for, and never torch.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from closeranks.launch.options import (
    RunOptions,
    parse_endpoint,
    parse_nodes,
    parse_ranks,
    parse_workers,
)

_BAD_INPUT = 2
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser()
    try:
        values = parser.parse_args(given)
        return int(values.call(values))
    except ValueError as error:
        sys.stderr.write(f"closeranks: {error}\n")
        return _BAD_INPUT
    except KeyboardInterrupt:
        return _INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """One clear line instead of a page of usage."""

    def error(self, message: str) -> None:  # type: ignore[override]
        message = re.sub(r"^argument [^:]+: (?!invalid|expected|not allowed)", "", message)
        raise ValueError(f"{message} (`{self.prog} --help` shows what there is)")


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="closeranks",
        description="Run, watch and measure data-parallel training with PyTorch.",
    )
    parser.set_defaults(call=lambda values: _show_help(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)
    add_run(commands)
    return parser


def _show_help(parser: argparse.ArgumentParser) -> int:
    sys.stdout.write(parser.format_help())
    return 0


def add_run(commands: argparse._SubParsersAction[_Parser]) -> None:
    run = commands.add_parser(
        "run",
        help="run a script on all cores or GPUs of this machine",
        usage="closeranks run [options] (SCRIPT | -m MODULE) [arguments of the script]",
        description="Run a script as several workers, show their output, and say what went wrong. "
        "torchrun's spellings are understood.",
        allow_abbrev=False,
    )
    _add_job(run)
    _add_output(run)
    _add_trouble(run)
    _add_machines(run)
    run.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    run.set_defaults(call=_run)


def _add_job(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("the job")
    _add(
        group,
        "-n",
        "--nproc-per-node",
        type=_value(parse_workers),
        metavar="N",
        dest="workers",
        help="workers on this machine (default: one for each GPU, or else for each core)",
    )
    _add(group, "-m", "--module", action="store_true", help="SCRIPT is a module, as with python -m")
    _add(
        group,
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="start all workers again after a failure, at most N times (default 0)",
    )
    _add(
        group,
        "--no-fork",
        dest="fork",
        action="store_const",
        const=False,
        help="give every worker a Python of its own instead of forking it from one that has "
        "imported torch (always so where there is a GPU)",
    )


def _add_output(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("output")
    _add(
        group,
        "--show",
        type=_value(parse_ranks),
        metavar="RANKS",
        help="show only these ranks, like 0 or 0,3 or 0-3; the logs hold all",
    )
    _add(group, "--log-dir", type=Path, metavar="DIR", help="where logs go (default: runs)")
    _add(
        group,
        "--name",
        metavar="NAME",
        help="folder of this job in the log dir (default: script, date, time, pid)",
    )


def _add_trouble(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("when something goes wrong")
    _add(
        group,
        "--hang-report",
        type=float,
        default=60.0,
        metavar="S",
        help="say which rank the others wait for, after S seconds (default 60)",
    )
    _add(
        group,
        "--hang-timeout",
        type=float,
        metavar="S",
        help="end a job that hangs so long, with exit code 124 (default: never)",
    )
    _add(
        group,
        "--grace",
        type=float,
        default=20.0,
        metavar="S",
        help="time for the workers to end after a SIGTERM (default 20)",
    )


def _add_machines(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("several machines: run the same command on each")
    _add(
        group,
        "--nnodes",
        type=_value(parse_nodes),
        default=1,
        metavar="N",
        help="how many machines",
    )
    _add(group, "--node-rank", type=int, metavar="R", help="the number of this one, from 0")
    _add(
        group,
        "--rdzv-endpoint",
        type=_value(parse_endpoint),
        metavar="HOST:PORT",
        help="where the launchers meet; the first machine listens there",
    )
    _add(
        group,
        "--standalone",
        action="store_true",
        help="this machine alone, which is the default",
    )


def _add(group: argparse._ArgumentGroup, *names: str, **options: Any) -> None:
    """An option, also understood when it is spelled with _ as torchrun allows."""
    kept = group.add_argument(*names, **options)
    spellings = ["--" + name[2:].replace("-", "_") for name in names if "-" in name[2:]]
    if spellings:
        hidden = {"dest": kept.dest, "help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        group.add_argument(*spellings, **(options | hidden))


def _value(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser of values whose own words reach the user."""

    def parse_or_explain(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_or_explain


def _run(values: argparse.Namespace) -> int:
    from closeranks.launch.run import run

    if not values.command:
        raise ValueError("name a script to run: closeranks run [options] SCRIPT [arguments]")
    if values.command[0].startswith("-"):
        option = values.command[0]
        raise ValueError(f"{option}: no such option (`closeranks run --help` shows what there is)")
    options = RunOptions(
        target=values.command[0],
        arguments=tuple(values.command[1:]),
        is_module=values.module,
        workers=values.workers,
        nodes=values.nnodes,
        node_rank=values.node_rank,
        endpoint=values.rdzv_endpoint,
        restarts_max=values.max_restarts,
        log_dir=values.log_dir,
        name=values.name,
        show=values.show,
        fork=values.fork,
        hang_report_s=values.hang_report,
        hang_timeout_s=values.hang_timeout,
        grace_s=values.grace,
    )
    return run(options)
