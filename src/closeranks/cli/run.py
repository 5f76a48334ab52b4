"""`closeranks run`: its options, and from their values to RunOptions."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from closeranks.cli.parser import Commands, add_option, value_of
from closeranks.cli.torchrun import (
    add_torchrun,
    endpoint_of,
    notes_of,
    take_from_environment,
)
from closeranks.launch.options import (
    RunOptions,
    parse_endpoint,
    parse_nodes,
    parse_ranks,
    parse_workers,
)


def add_run(commands: Commands) -> None:
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
    add_torchrun(run)
    take_from_environment(run, os.environ)
    run.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    run.set_defaults(call=_run)


def _add_job(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("the job")
    add_option(
        group,
        "-n",
        "--nproc-per-node",
        type=value_of(parse_workers),
        metavar="N",
        dest="workers",
        help="workers on this machine (default: one for each GPU, or else for each core)",
    )
    add_option(
        group, "-m", "--module", action="store_true", help="SCRIPT is a module, as with python -m"
    )
    add_option(
        group,
        "--max-restarts",
        type=int,
        metavar="N",
        help="start all workers again after a failure, at most N times (default 0); in a job that "
        "made a Ranks, start the one that died again, N times without a step (default 3)",
    )
    add_option(
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
    add_option(
        group,
        "--show",
        type=value_of(parse_ranks),
        metavar="RANKS",
        help="show only these ranks, like 0 or 0,3 or 0-3; the logs hold all",
    )
    add_option(group, "--log-dir", type=Path, metavar="DIR", help="where logs go (default: runs)")
    add_option(
        group,
        "--name",
        metavar="NAME",
        help="folder of this job in the log dir (default: script, date, time, pid)",
    )


def _add_trouble(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("when something goes wrong")
    add_option(
        group,
        "--hang-report",
        type=float,
        default=60.0,
        metavar="S",
        help="say which rank the others wait for, after S seconds (default 60)",
    )
    add_option(
        group,
        "--hang-timeout",
        type=float,
        metavar="S",
        help="end a job that hangs so long, with exit code 124 (default: never)",
    )
    add_option(
        group,
        "--grace",
        "--shutdown-timeout",
        type=float,
        default=20.0,
        metavar="S",
        help="time for the workers to end after a SIGTERM (default 20)",
    )


def _add_machines(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("several machines: run the same command on each")
    add_option(
        group,
        "--nnodes",
        type=value_of(parse_nodes),
        default=1,
        metavar="N",
        help="how many machines",
    )
    add_option(
        group,
        "--node-rank",
        type=int,
        metavar="R",
        help="the number of this one, from 0 (default: as they arrive)",
    )
    add_option(
        group,
        "--rdzv-endpoint",
        type=value_of(parse_endpoint),
        metavar="HOST:PORT",
        help="where the launchers meet; the first machine listens there",
    )
    add_option(
        group,
        "--wire",
        metavar="FORMAT",
        help="the format of gradients between machines where the script does not say: bf16, fp16, "
        "int8, powersgd:RANK, auto or exact (the default)",
    )
    add_option(
        group,
        "--standalone",
        action="store_true",
        help="this machine alone, which is the default",
    )


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
        endpoint=endpoint_of(values),
        port=values.master_port or 0,
        run_id=values.rdzv_id,
        role=values.role,
        wire=values.wire,
        is_program=values.no_python,
        notes=notes_of(values),
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
