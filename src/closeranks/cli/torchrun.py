"""torchrun's options that are not ours: other spellings, needless ones, and its PET_* variables.

A command that was written for torchrun works as it is. What has no meaning here is taken, and a
line says so; what would have a meaning that is missing here is an unknown option like any other.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from closeranks.cli.parser import add_option, value_of
from closeranks.launch.options import DEFAULT_PORT, parse_endpoint, parse_ranks

# Names: what to call the value, and why it is needless. No value: a switch.
_NEEDLESS = {
    "--rdzv-backend": ("NAME", "launchers meet in one way"),
    "--rdzv-conf": ("CONF", "launchers meet in one way"),
    "--monitor-interval": ("S", "workers are watched all the time"),
    "--start-method": ("NAME", "--no-fork is the choice there is"),
    "-t --tee": ("WHAT", "output is always shown and logged"),
    "-r --redirects": ("WHAT", "output is always shown and logged; --show chooses ranks"),
    "--local-addr": ("ADDRESS", "each machine finds its own by the way to the endpoint"),
    "--run-path": ("", "scripts are always run by their path"),
}
_PREFIX = "PET_"


def add_torchrun(run: argparse.ArgumentParser) -> None:
    needless = ", ".join(names.split()[-1] for names in _NEEDLESS)
    group = run.add_argument_group(
        "torchrun's, for commands that were written for it",
        f"Also taken, and needless: {needless}. PET_* variables are read as torchrun does.",
    )
    add_option(group, "--role", default="default", metavar="NAME", help="ROLE_NAME of the workers")
    add_option(
        group, "--no-python", action="store_true", help="SCRIPT is a program of its own, not Python"
    )
    add_option(
        group, "--rdzv-id", default="none", metavar="ID", help="a name of the job, equal everywhere"
    )
    add_option(group, "--master-addr", metavar="HOST", help="the endpoint's host")
    add_option(group, "--master-port", type=int, metavar="PORT", help="the endpoint's port")
    add_option(
        group,
        "--local-ranks-filter",
        type=value_of(parse_ranks),
        dest="show",
        default=argparse.SUPPRESS,
        metavar="RANKS",
        help="another spelling of --show",
    )
    for names, (metavar, _) in _NEEDLESS.items():
        hidden = {"dest": _dest(names), "help": argparse.SUPPRESS}
        if metavar:
            add_option(group, *names.split(), metavar=metavar, **hidden)
        else:
            add_option(group, *names.split(), action="store_const", const="", **hidden)


def endpoint_of(values: argparse.Namespace) -> tuple[str, int] | None:
    """Where launchers meet, in either spelling."""
    if values.rdzv_endpoint is not None:
        given: tuple[str, int] = values.rdzv_endpoint
        return given
    if values.master_addr is None and values.master_port is None:
        return None
    port = DEFAULT_PORT if values.master_port is None else values.master_port
    return parse_endpoint(f"{values.master_addr or '127.0.0.1'}:{port}")


def notes_of(values: argparse.Namespace) -> tuple[str, ...]:
    """What was asked for in vain, and why nobody needs it."""
    return tuple(
        f"{names.split()[-1]} is needless here: {why}"
        for names, (_, why) in _NEEDLESS.items()
        if getattr(values, _dest(names)) is not None
    )


def take_from_environment(run: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """PET_NNODES and so on become defaults; the command line goes before them."""
    for action in run._actions:
        name = f"{_PREFIX}{action.dest.upper()}"
        names = [f"{_PREFIX}{o[2:].replace('-', '_').upper()}" for o in action.option_strings]
        value = next((environ[n] for n in [name, *names] if environ.get(n)), None)
        if value is None or action.dest == "help":
            continue
        if action.nargs == 0:
            run.set_defaults(**{action.dest: value not in ("0", "false", "False")})
        else:
            action.default = value  # argparse turns a text into a value as if it had been typed


def _dest(names: str) -> str:
    return "needless_" + names.split()[-1][2:].replace("-", "_")
